"""Running a model through a cache: generating, reading given texts, rating, CUDA graphs."""
