"""Filters: rewrite the prompt before it is cached."""
