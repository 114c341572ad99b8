"""What decides a run's outcome: its cell, the code that computes it, and where it ran."""
