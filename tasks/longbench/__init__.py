"""LongBench v1 (Bai et al. 2023, arXiv 2308.14508): 21 subsets, English, Chinese and code, and LongBench-E."""
