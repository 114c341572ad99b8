"""Published tables and claims of papers, compared with runs: `python -m kvbench.tables`, `python -m kvbench.claims`."""
