"""`python -m kvbench` as a function: see `kvbench.sweeps.app`."""

from kvbench.sweeps.app import main

__all__ = ["main"]
