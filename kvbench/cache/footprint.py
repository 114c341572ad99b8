"""The KV footprint: the entries that a cache holds, summed over the tokens that are fed (arXiv 2506.17121).

A call that feeds n tokens onto h entries counts n h + n (n + 1) / 2: every token finds the h entries, the tokens before
it, and itself. A full cache of t tokens counts t (t + 1) / 2, in however many calls they are fed.
"""


def fed(held: float, tokens: int) -> float:
    """Entries that one call counts for `tokens` tokens onto `held` entries, a mean over KV heads."""
    return tokens * held + tokens * (tokens + 1) // 2


def decoded(held: float, steps: int, grow: int) -> float:
    """Entries of `steps` calls of one token each, while the cache grows by at most `grow` entries, then stays."""
    growing = min(steps, grow)
    return fed(held, growing) + (steps - growing) * (held + growing + 1)
