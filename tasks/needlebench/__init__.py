"""NeedleBench (Li et al. 2024, arXiv 2407.11963): single retrieval, multi retrieval and multi reasoning, en and zh."""
