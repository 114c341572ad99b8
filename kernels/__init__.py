"""Attention kernels: PyTorch references, Triton kernels and their launchers."""
