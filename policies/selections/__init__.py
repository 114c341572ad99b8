"""Selections: units of tokens, such as chunks, that are kept or evicted together."""
