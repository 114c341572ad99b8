"""What a layer holds: the attention hook, layers, budgets, eviction, audit."""
