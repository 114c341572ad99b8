"""What the papers say, as checks on the numbers they print and on our runs. `python -m kvbench.claims`."""
