"""Wrappers that make any scorer value-aware."""
