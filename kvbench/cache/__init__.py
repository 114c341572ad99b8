"""What a layer holds: the attention hook, layers, budgets, eviction, audit."""

NAME = "kvbench"
"""Name of kvbench's attention function in transformers' registry."""
