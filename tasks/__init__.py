"""What to ask, and how to score one answer: `task.py` is the contract, every other file holds one kind of task."""
