"""Diagnostics of policies, one per file, each with a tidy table and a figure.

A diagnostic module has `TITLE`, `measure(probe) -> list[dict]` (rows of one policy on one prompt) and
`draw(table, figure)`. An optional `check(policy, name)` raises ValueError for unsupported policies.
"""
