"""What lies on disk of a run: its samples, shards, locks, and the sweep it belongs to."""
