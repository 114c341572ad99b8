"""Readers: of all that is held, what a decoded token reads."""
