"""LongBench v2 (Bai et al. 2024, arXiv 2412.15204): 503 questions with four choices about long texts."""
