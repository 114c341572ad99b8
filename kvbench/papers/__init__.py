"""Published tables: the numbers the papers print, in their layout, and beside ours. `python -m kvbench.tables`."""
