"""What a KV cache keeps: scorers, value-aware wrappers, allocators, mergers, stores, and their composition."""
