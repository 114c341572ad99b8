"""RULER's synthetic tasks (Hsieh et al. 2024, arXiv 2404.06654), one file per generator."""
