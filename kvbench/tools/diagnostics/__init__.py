"""Diagnostics of policies, one per file, each with a tidy table and a figure.

A module has `TITLE`, `check(policy, name)`, which raises ValueError for unsupported policies,
`measure(probe) -> list[dict]` (rows of one policy on one prompt) and `draw(table, figure)`.
"""
