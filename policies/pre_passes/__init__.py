"""Pre-passes: extra forward passes over a prompt, or ratings of its tokens, before eviction."""
