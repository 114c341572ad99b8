"""Sequences in flight: who is admitted while memory allows, decoded in one batch, finished."""
