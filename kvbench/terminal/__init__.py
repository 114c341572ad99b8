"""Argument parsing, error messages, progress bars, signals."""
