"""Filler in which something is hidden: sentences written by a small seeded grammar, or the text files of a folder."""

from __future__ import annotations

import random
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from functools import cache
from itertools import accumulate, cycle, pairwise
from os.path import expanduser
from pathlib import Path

from kvbench.errors import ConfigError
from kvbench.tasks.words import own_words

# A full stop, its closing marks and the white space after it; Chinese stops need none. Found in text, not in tokens,
# so that it works for any tokenizer. An abbreviation counts as an end, which moves a needle by a few words at most.
_END = re.compile(r"[.!?][\"'”’)\]]*\s+|[。！？][”’」]*\s*|\n\s*\n")

_WHO = (
    "the {adjective} {noun}",
    "every {noun}",
    "another {noun}",
    "this {adjective} {noun}",
    "some old {noun}",
    "no {noun} and no {noun}",
    "the {noun} of the {noun}",
    "we",
    "they",
    "you and the {noun}",
)
_DOES = (
    "will {verb} before the {noun}",
    "can {verb} near the {adjective} {noun}",
    "must {verb} and {verb}",
    "did not {verb} the {noun}",
    "should {verb} with the {noun}",
    "may {verb} until the {noun} is {adjective}",
    "could never {verb} without the {noun}",
    "would rather {verb} than {verb}",
    "might {verb} under the {noun}",
    "shall {verb} through the {adjective} {noun}",
)
_LINKS = (" while ", " because ", " and then ", " but ", " so ")
_OPENINGS = ("Once more ", "Today ", "In the end ", "After that ", "Perhaps ", "Sometimes ")


def written_sentences(rng: random.Random) -> Iterator[str]:
    """Sentences without end, each with a blank after it. They hold no digit and no hyphen."""
    while True:
        text = _clause(rng)
        if rng.random() < 0.3:
            text += rng.choice(_LINKS) + _clause(rng)
        if rng.random() < 0.2:
            text = rng.choice(_OPENINGS) + text
        yield text[0].upper() + text[1:] + ". "


def _clause(rng: random.Random) -> str:
    words = own_words()
    draw = {"adjective": words.adjectives, "noun": words.nouns, "verb": words.verbs}
    pattern = f"{rng.choice(_WHO)} {rng.choice(_DOES)}"
    return re.sub(r"\{(\w+)\}", lambda slot: rng.choice(draw[slot[1]]), pattern)


def sentences_of(text: str) -> list[str]:
    """The text cut after every sentence; nothing is lost: the pieces joined are the text."""
    cuts = [0, *(match.end() for match in _END.finditer(text)), len(text)]
    return [text[start:end] for start, end in pairwise(cuts) if end > start]


@cache
def read_folder(data_dir: str) -> str:
    """The `*.txt` files of a folder in the order of their names, as one text with a blank line between them.

    Raises ValueError if there is no such folder, no such file, a file is not UTF-8, or all are empty.
    """
    folder = Path(expanduser(data_dir))
    if not folder.is_dir():
        raise ConfigError("data_dir", data_dir, why="is not a folder, a haystack needs a folder of .txt files")
    texts = [_read(path) for path in sorted(folder.glob("*.txt"))]
    whole = "\n\n".join(text.strip() for text in texts if text.strip())
    if not whole:
        raise ConfigError("data_dir", data_dir, why="holds no text, a haystack needs .txt files that are not empty")
    return whole + "\n\n"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"data_dir holds {path.name}, which is not UTF-8 text: {error.reason}") from error


def repeated(text: str) -> Iterator[str]:
    """The sentences of a text, again and again."""
    return cycle(sentences_of(text))


class Filler:
    """The first sentences of an endless stream, kept as they are taken."""

    def __init__(self, stream: Iterator[str]) -> None:
        self._stream = stream
        self._taken: list[str] = []
        self._ends = [0]  # characters of the first 0, 1, 2, ... sentences

    def first(self, size: int) -> list[str]:
        """The first `size` sentences."""
        while len(self._taken) < size:
            self._take()
        return self._taken[:size]

    def fitting(self, characters: float) -> int:
        """How many sentences are at most so many characters."""
        while self._ends[-1] <= characters:
            self._take()
        return bisect_right(self._ends, characters) - 1

    def characters(self, size: int) -> int:
        """Characters of the first `size` sentences."""
        self.first(size)
        return self._ends[size]

    def _take(self) -> None:
        self._taken.append(next(self._stream))
        self._ends.append(self._ends[-1] + len(self._taken[-1]))


def hide(needles: tuple[str, ...], depths: tuple[float, ...], sentences: list[str]) -> str:
    """The sentences with every needle at the end of a sentence (or the start of the text) nearest to its depth.

    sentences: with the white space after them. depths: shares of the characters of the text, 0 to 1.
    """
    ends = [0, *accumulate(map(len, sentences))]
    hidden: dict[int, list[str]] = {}
    for needle, depth in zip(needles, depths, strict=True):
        hidden.setdefault(_nearest(ends, depth * ends[-1]), []).append(needle)
    pieces = []
    for place in range(len(ends)):
        pieces += [sentences[place - 1]] if place else []
        before = "" if not pieces or pieces[-1][-1].isspace() else " "
        pieces += [before + " ".join(hidden[place]) + " "] if place in hidden else []
    return "".join(pieces).rstrip()


def _nearest(ends: list[int], target: float) -> int:
    """Index of the end nearest to the target; the earlier of two."""
    after = min(bisect_left(ends, target), len(ends) - 1)
    return after - 1 if after and target - ends[after - 1] <= ends[after] - target else after


def largest_fitting(tokens: Callable[[int], int], filler: Filler, room: int) -> int:
    """Most sentences of `filler` with tokens(size) <= room, for tokens that grow; -1 if tokens(0) is more than room.

    Guesses by the tokens that a character took so far, which differ less from place to place than those of a sentence,
    so that a prompt is encoded about five times, twice of them short, and not log2(sizes) times.
    """
    start = tokens(0)
    if start > room:
        return -1
    low, high, guess = 0, None, 16
    while high is None or high - low > 1:
        guess = max(guess, low + 1) if high is None else min(max(guess, low + 1), high - 1)
        used = tokens(guess)
        low, high = (guess, high) if used <= room else (low, guess)
        per_token = filler.characters(guess) / max(used - start, 1)
        guess = filler.fitting((room - start) * per_token)
    return low
