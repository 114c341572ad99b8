"""Dashboards that show runs while they are computed. They receive copies: the files in `out` are what counts."""
