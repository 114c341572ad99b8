"""Haystacks: sentences written by a small seeded grammar, or the text files of a folder."""

from __future__ import annotations

import random
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import accumulate, cycle, islice, pairwise
from os.path import expanduser
from pathlib import Path

from kvbench.errors import ConfigError
from kvbench.tasks.text_files import shipped, texts
from kvbench.tasks.words import own_words

# A full stop, its closing marks and the white space after it; Chinese stops need none. Found in text, not in tokens,
# so that it works for any tokenizer. An abbreviation counts as an end, which moves a needle by a few words at most.
_END = re.compile(r"[.!?][\"'”’)\]]*\s+|[。！？][”’」]*\s*|\n\s*\n")


def written_sentences(rng: random.Random) -> Iterator[str]:
    """An endless stream of sentences, each followed by a space. They contain no digits and no hyphens."""
    grammar = shipped("sentences.json")
    while True:
        text = _clause(rng, grammar)
        if rng.random() < 0.3:
            text += rng.choice(grammar["links"]) + _clause(rng, grammar)
        if rng.random() < 0.2:
            text = rng.choice(grammar["openings"]) + text
        yield text[0].upper() + text[1:] + ". "


def _clause(rng: random.Random, grammar: Mapping[str, list[str]]) -> str:
    words = own_words()
    draw = {"adjective": words.adjectives, "noun": words.nouns, "verb": words.verbs}
    pattern = f"{rng.choice(grammar['who'])} {rng.choice(grammar['does'])}"
    return re.sub(r"\{(\w+)\}", lambda slot: rng.choice(draw[slot[1]]), pattern)


def sentences_of(text: str) -> list[str]:
    """The text split after every sentence. Joining the pieces gives the text."""
    cuts = [0, *(match.end() for match in _END.finditer(text)), len(text)]
    return [text[start:end] for start, end in pairwise(cuts) if end > start]


@cache
def read_folder(data_dir: str) -> str:
    """The `*.txt` files of a folder in the order of their names, as one text with a blank line between them.

    Raises ValueError if the folder or its files do not exist, or if a file is empty or not UTF-8.
    """
    if not Path(expanduser(data_dir)).is_dir():
        raise ConfigError("data_dir", data_dir, why="is not a folder, a haystack needs a folder of .txt files")
    return "".join(text.text.strip() + "\n\n" for text in texts(data_dir, ("*.txt",), ""))


def repeated(text: str) -> Iterator[str]:
    """The sentences of a text, repeated endlessly."""
    return cycle(sentences_of(text))


class Filler:
    """A stream of sentences that remembers the sentences taken so far."""

    def __init__(self, stream: Iterator[str]) -> None:
        self._stream = stream
        self._taken: list[str] = []

    def first(self, size: int) -> list[str]:
        """The first `size` sentences."""
        self._taken.extend(islice(self._stream, max(size - len(self._taken), 0)))
        return self._taken[:size]


def hide(needles: tuple[str, ...], depths: tuple[float, ...], sentences: list[str]) -> str:
    """The sentences with every needle at the end of a sentence (or the start of the text) nearest to its depth.

    sentences: with the white space after them. depths: shares of the characters of the text, 0 to 1.
    """
    ends = [0, *accumulate(map(len, sentences))]
    hidden: dict[int, list[str]] = {}
    for needle, depth in zip(needles, depths, strict=True):
        hidden.setdefault(_nearest(ends, depth * ends[-1]), []).append(needle)
    pieces = []
    for index in range(len(ends)):
        pieces += [sentences[index - 1]] if index else []
        before = "" if not pieces or pieces[-1][-1].isspace() else " "
        pieces += [before + " ".join(hidden[index]) + " "] if index in hidden else []
    return "".join(pieces).rstrip()


def _nearest(ends: list[int], target: float) -> int:
    """Index of the end nearest to the target; the earlier of two."""
    after = min(bisect_left(ends, target), len(ends) - 1)
    return after - 1 if after and target - ends[after - 1] <= ends[after] - target else after


def largest_fitting(tokens: Callable[[int], int], limit: int) -> int:
    """The largest size with tokens(size) <= limit, for a function that grows with size; -1 if tokens(0) exceeds it.

    Each guess uses the mean number of tokens per sentence so far, so a prompt is encoded only a few times.
    """
    start = tokens(0)
    if start > limit:
        return -1
    low, high, guess = 0, None, 16
    while high is None or high - low > 1:
        guess = max(guess, low + 1) if high is None else min(max(guess, low + 1), high - 1)
        used = tokens(guess)
        low, high = (guess, high) if used <= limit else (low, guess)
        guess = guess * (limit - start) // max(used - start, 1)
    return low
