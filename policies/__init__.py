"""Eviction policies: scorers, value-aware wrappers, allocators, mergers, stores, and their composition."""
