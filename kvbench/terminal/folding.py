"""Text wrapped to the terminal's width; columns of indented lines are kept, and words are not split."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from itertools import groupby

NARROWEST, WIDEST = 40, 120
_COLUMNS = re.compile(r" +\S.*?  +(?=\S)|  +")
"""The text before the last column of an indented line: the indent, and a name followed by spaces."""


def help_width() -> int:
    """Characters per line of help: the terminal's width (COLUMNS, or 80 without a terminal), within limits."""
    return max(NARROWEST, min(shutil.get_terminal_size().columns, WIDEST))


def terminal_width() -> int | None:
    """Characters per line if stdout is a terminal, otherwise None."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def fold(text: str, width: int) -> str:
    """The text in lines of at most `width` characters, except for longer words.

    A line that begins with a space stays a separate line and continues below its second column. Other lines form a
    paragraph up to an empty line.
    """
    folded: list[str] = []
    for separate, lines in groupby(text.splitlines(), key=lambda line: not line.strip() or line[0] == " "):
        if separate:
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
