"""Where an answer differs from another one, word by word."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import SequenceMatcher
from itertools import groupby
from operator import itemgetter

SAME, ADDED, MISSING = 0, 1, 2
Piece = tuple[str, int]
"""Words as they stand, and whether both answers have them, this one alone, or only the other."""
LONGEST = 2_000  # words: comparing takes the product of two lengths
_WORD = re.compile(r"\s*[^\W_]+|\s*[^\w\s]|\s*_|\s+")


def pieces(own: str, other: str) -> list[Piece]:
    """`own` in pieces: shared with `other`, added, and, marked as missing, pieces that only `other` has.

    The pieces that are not missing are `own`, character for character. Beyond 2,000 words the two are only compared as
    a whole.
    """
    if own == other:
        return [(own, SAME)] if own else []
    first, second = _words(other), _words(own)
    if max(len(first), len(second)) > LONGEST:
        return [(own, ADDED)]
    kinds = groupby(_compared(first, second), key=itemgetter(1))
    return [("".join(words for words, _ in members), kind) for kind, members in kinds]


def _words(text: str) -> list[str]:
    return _WORD.findall(text)


def _compared(first: list[str], second: list[str]) -> Iterator[Piece]:
    for what, i, j, k, n in SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        if what == "equal":
            yield "".join(second[k:n]), SAME
            continue
        if i < j:
            yield "".join(first[i:j]), MISSING
        if k < n:
            yield "".join(second[k:n]), ADDED
