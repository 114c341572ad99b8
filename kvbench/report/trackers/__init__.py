"""Trackers that log runs while they are computed. The files in `out` remain the primary record."""
