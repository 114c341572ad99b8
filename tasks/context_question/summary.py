"""Means of several metrics, in percent; of a single one the score is all there is."""

from kvbench.tasks.summary import mean_measures as summary

__all__ = ["summary"]
