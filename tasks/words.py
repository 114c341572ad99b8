"""Generated texts: word lists, sentences of a small seeded grammar, and haystacks with needles."""

from __future__ import annotations

import json
import random
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from importlib.util import find_spec
from itertools import accumulate, cycle, islice, pairwise
from os.path import expanduser
from pathlib import Path
from typing import Any

from kvbench.errors import ConfigError
from kvbench.tasks.text_files import texts

WONDERWORDS = "3.0.1"  # 2.2.0 differs by four nouns, which changes every sample drawn after them


@cache
def shipped(name: str) -> Any:  # noqa: ANN401 - JSON
    """The content of a file of `tasks/data`, which names the source and licence of benchmark texts."""
    return json.loads(files("kvbench.tasks").joinpath(f"data/{name}").read_text(encoding="utf-8"))


class SortedPairs:
    """`sorted({f"{a}-{n}" for a in adjectives for n in nouns})` as a lazy sequence.

    The official lists have 6.2 million pairs; building all of them takes 8 s and 0.8 GB. In sorted order, the pairs of
    one adjective are adjacent, unless "x-" is a prefix of another adjective's "x-y-". Only such groups are merged.
    """

    def __init__(self, adjectives: Iterable[str], nouns: Iterable[str]) -> None:
        self._nouns = sorted(set(nouns))
        self._blocks: list[str | list[str]] = []  # a head that all nouns follow, or pairs
        self._starts: list[int] = []
        self._length = 0
        heads = sorted({f"{adjective}-" for adjective in adjectives})
        while heads:
            cluster = [head for head in heads if head.startswith(heads[0])]
            heads = heads[len(cluster) :]
            merged = sorted({head + noun for head in cluster for noun in self._nouns}) if len(cluster) > 1 else None
            self._starts.append(self._length)
            self._blocks.append(cluster[0] if merged is None else merged)
            self._length += len(self._nouns if merged is None else merged)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> str:
        index = range(len(self))[index]  # IndexError and negative numbers as a list has them
        place = bisect_right(self._starts, index) - 1
        block, offset = self._blocks[place], index - self._starts[place]
        return block + self._nouns[offset] if isinstance(block, str) else block[offset]


@dataclass(frozen=True)
class Words:
    """The words a generator may draw."""

    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]
    verbs: tuple[str, ...]

    @cached_property
    def pairs(self) -> SortedPairs:
        """All "adjective-noun" strings, sorted: the keys of RULER's needles."""
        return SortedPairs(self.adjectives, self.nouns)

    @cached_property
    def words(self) -> list[str]:
        """All words once, sorted."""
        return sorted({*self.nouns, *self.adjectives, *self.verbs})

    @cached_property
    def compounds(self) -> list[str]:
        """Closed compounds, sorted: the source of common words if there are too few single words."""
        return sorted({adjective + noun for adjective in self.adjectives for noun in self.nouns})


@cache
def own_words() -> Words:
    """250 adjectives, 700 nouns, 250 verbs, lower-case and sorted; no word is in two lists."""
    return Words(*(tuple(shipped("words.json")[kind]) for kind in ("adjectives", "nouns", "verbs")))


@cache
def official_words() -> Words:
    """The lists of package wonderwords 3.0.1. ValueError if that version is not installed."""
    try:
        found = version("wonderwords")
    except PackageNotFoundError:
        found = "none"
    spec = find_spec("wonderwords")
    if found != WONDERWORDS or spec is None or spec.origin is None:
        wanted = f"wonderwords=={WONDERWORDS}"
        why = f"draws from the word lists of {wanted}, found {found}: pip install {wanted}"
        raise ConfigError("official", True, why=why)
    assets = Path(spec.origin).parent / "assets"
    lists = ((assets / f"{kind}list.txt").read_text(encoding="utf-8") for kind in ("adjective", "noun", "verb"))
    return Words(*(tuple(line.rstrip() for line in text.splitlines()) for text in lists))


@cache
def official_second_list(data_dir: str | None) -> list[str]:
    """RULER's `english_words.json`, in file order. ValueError if it is not in `data_dir`."""
    path = Path(data_dir or ".") / "english_words.json"
    if data_dir is None or not path.is_file():
        raise ConfigError(
            "data_dir",
            data_dir,
            why="has no english_words.json, which official=true needs at this length: "
            "fetch NVIDIA/RULER's scripts/data/synthetic/json/english_words.json (git LFS)",
        )
    return list(json.loads(path.read_text(encoding="utf-8")).values())


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
