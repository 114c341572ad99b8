"""What a policy did, and why: one diagnostic per file, each a tidy table and a picture.

A diagnostic module has `TITLE`, `measure(probe) -> list[dict]` (rows of one policy on one prompt) and
`draw(table, figure)`; where not every policy will do, also `check(policy, name)`, which raises ValueError.
"""
