"""The means of LongProc's official metrics, in percent."""

from kvbench.tasks.scores import mean_measures as summary

__all__ = ["summary"]
