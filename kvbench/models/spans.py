"""Parts of a prompt as token positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile

Spans = Mapping[str, tuple[tuple[int, int], ...]]
"""Parts of a prompt by name: [a, b) each, in characters or in token positions."""


def common(first: Sequence[object], second: Sequence[object]) -> int:
    """The length of the common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def token_spans(encode: Callable[[str], list[int]], text: str, whole: list[int], spans: Spans) -> Spans:
    """The token positions of parts of a text with tokens `whole`: of every token that has a character of the part."""

    def end(at: int) -> int:
        before = encode(text[:at])
        complete = common(before, whole)
        return complete + (complete < len(before))  # the next token has the rest, and text that follows

    return {name: tuple((common(encode(text[:a]), whole), end(b)) for a, b in parts) for name, parts in spans.items()}


def moved(spans: Spans, by: int) -> Spans:
    """The spans in a text with `by` more characters before it."""
    return {name: tuple((a + by, b + by) for a, b in parts) for name, parts in spans.items()}


def without(spans: Spans, first: int, end: int) -> Spans:
    """The spans after [first, end) was cut out of their text, those that are cut out left out."""

    def place(at: int) -> int:
        return min(at, first) if at <= end else at - (end - first)

    found = {name: [(place(a), place(b)) for a, b in parts] for name, parts in spans.items()}
    return {name: kept for name, parts in found.items() if (kept := tuple(part for part in parts if part[1] > part[0]))}
