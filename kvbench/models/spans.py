"""Parts of a prompt as token positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import takewhile

Spans = Mapping[str, tuple[tuple[int, int], ...]]
"""Parts of a prompt by name: [a, b) each, in characters or in token positions."""


def common(first: list[int], second: list[int]) -> int:
    """The length of the common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def token_spans(encode: Callable[[str], list[int]], text: str, whole: list[int], tokens: int, spans: Spans) -> Spans:
    """The token positions of parts of a text, of which the last `tokens` of its tokens `whole` are the prompt.

    A token with text of a part and of what precedes it belongs to the part; one with text of what follows does not.
    """
    cut = len(whole) - tokens
    ends = {at: common(encode(text[:at]), whole) - cut for parts in spans.values() for part in parts for at in part}
    found = {name: [(max(0, ends[a]), ends[b]) for a, b in parts] for name, parts in spans.items()}
    return {name: tuple((a, b) for a, b in parts if b > a) for name, parts in found.items()}
