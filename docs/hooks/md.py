"""Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; columns with a name that ends in a colon are right-aligned."""
    lines = [
        f"| {' | '.join(name.removesuffix(':') for name in columns)} |",
        f"|{'|'.join('---:' if name.endswith(':') else '---' for name in columns)}|",
        *(f"| {' | '.join(map(str, row))} |" for row in rows),
    ]
    return "\n".join(lines)
