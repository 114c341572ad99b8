"""What a layer holds: the attention hook, layers, budgets, eviction, audit."""

NAME = "kvbench"
"""Under which transformers knows our attention."""
