"""LooGLE (Li et al. 2023, arXiv 2311.04939): questions, clozes and summaries of long documents."""
