"""Text folded to the terminal: paragraphs are filled, what stands in columns hangs below the last, no word is cut."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from itertools import groupby

NARROWEST, WIDEST = 40, 120
_COLUMNS = re.compile(r" +\S.*?  +(?=\S)|  +")
"""What stands before the last column of an indented line: its indent, and a name with a gap behind it."""


def help_width() -> int:
    """Letters to a line: the terminal's (COLUMNS, or 80 where there is none), as far as eyes can follow."""
    return max(NARROWEST, min(shutil.get_terminal_size().columns, WIDEST))


def terminal_width() -> int | None:
    """Letters to a line of the terminal that stdout is; None where it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def fold(text: str, width: int) -> str:
    """The text in lines of at most `width` letters, but for words that are longer.

    Lines that begin with a space are kept apart, and what does not fit hangs below their second column; others are a
    paragraph until an empty line.
    """
    folded: list[str] = []
    for stands, lines in groupby(text.splitlines(), key=lambda line: not line.strip() or line[0] == " "):
        if stands:
            folded += [_hanging(line, width) for line in lines]
        else:
            folded.append(_fill(" ".join(lines), width, ""))
    return "\n".join(folded)


def _hanging(line: str, width: int) -> str:
    before = _COLUMNS.match(line)
    column = before.end() if before else 0
    return _fill(line, width, " " * min(column, width // 2))


def _fill(line: str, width: int, indent: str) -> str:
    return textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
