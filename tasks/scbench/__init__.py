"""SCBench (Li et al. 2024, arXiv 2412.10319): the scores of its 12 tasks."""
