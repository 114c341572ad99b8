"""Who gets how much: budgets per layer."""
