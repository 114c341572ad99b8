"""The hot loops: per file a plain PyTorch reference, a Triton kernel and its launcher."""
