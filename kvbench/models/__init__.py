"""Checkpoints and prompts: finding, trying and loading models, tokens, prompts."""
