"""InfiniteBench (Zhang et al. 2024, arXiv 2402.13718): 12 tasks of 100,000 tokens and more."""
