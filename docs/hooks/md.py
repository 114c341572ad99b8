"""Markdown: tables, and the prose of docstrings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; a column whose name ends in a colon is set to the right, as numbers are."""
    lines = [
        f"| {' | '.join(name.removesuffix(':') for name in columns)} |",
        f"|{'|'.join('---:' if name.endswith(':') else '---' for name in columns)}|",
        *(f"| {' | '.join(map(str, row))} |" for row in rows),
    ]
    return "\n".join(lines)


def prose(text: str) -> str:
    """Docstring prose as Markdown: a star between letters is a product, not emphasis."""
    text = re.sub(r"^(?!- |  )(.+)\n(?=- )", r"\1\n\n", text, flags=re.MULTILINE)  # a list begins after an empty line
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else part.replace("*", "\\*").replace("_", "\\_") for part in parts)
