"""Means of several metrics in percent; a single metric is the score itself."""

from kvbench.tasks.scores import mean_measures as summary

__all__ = ["summary"]
