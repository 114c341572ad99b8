"""Benchmarks: examples, prompts and scores of single answers. `task.py` has the interface."""
