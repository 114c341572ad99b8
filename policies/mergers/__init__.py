"""Mergers: how evicted tokens change kept ones."""
