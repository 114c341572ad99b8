"""Finished runs beside each other: records, tables, figures, trackers."""
