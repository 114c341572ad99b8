"""Suggestions for a name that does not exist."""

from collections.abc import Sequence
from difflib import get_close_matches

MOST = 3
"""The maximum number of suggestions."""


def close_names(name: str, allowed: Sequence[str]) -> list[str]:
    """Names that end or begin with this one (vt: ruler/vt, llama3: llama3_8b), or else names with similar spelling."""
    within = [known for known in allowed if known.endswith(f"/{name}") or (name and known.startswith(name))]
    spelt = get_close_matches(name, allowed, n=MOST) or get_close_matches(name.lower(), allowed, n=MOST)
    return within[:MOST] or spelt
