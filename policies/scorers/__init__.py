"""Scorers: the importance of every stored token."""
