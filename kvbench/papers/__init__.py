"""Published tables and claims of papers, compared with runs: `kvbench tables`, `kvbench claims`."""
