"""What lies on disk of a run: its samples, lock and metrics, and the sweep it belongs to."""
