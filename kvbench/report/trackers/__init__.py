"""Dashboards that are told of runs while they are computed. The files in `out` stay the truth; they get a copy."""
