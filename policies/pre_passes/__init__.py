"""Pre-passes: what the model computes of a prompt for a policy before anything of it is evicted."""
