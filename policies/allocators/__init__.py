"""Allocators: budgets per layer and KV head."""
