"""The HTML report: one file with tables, figures, examples and caveats."""
