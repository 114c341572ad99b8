"""`kvbench.evaluate`, `kvbench.generate` and `kvbench.load_results`, for programs and notebooks."""
