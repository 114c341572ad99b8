"""Where the RULER tasks take their words from: our own lists, or those the official generators draw from."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import overload

from kvbench.errors import ConfigError
from kvbench.tasks.words import own_words

WONDERWORDS = "3.0.1"  # 2.2.0 differs by four nouns, which changes every sample drawn after them


class SortedPairs(Sequence[str]):
    """`sorted({f"{a}-{n}" for a in adjectives for n in nouns})`, without writing it down.

    The official lists make 6.2 million pairs, 8 s and 0.8 GB on one core if they are all built. In sorted order
    the pairs of one adjective stand together, unless "x-" begins another one's "x-y-": only those are merged.
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

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]  # IndexError and negative numbers as a list has them
        place = bisect_right(self._starts, index) - 1
        block, offset = self._blocks[place], index - self._starts[place]
        return block + self._nouns[offset] if isinstance(block, str) else block[offset]


@dataclass(frozen=True)
class WordLists:
    """The words a generator may draw."""

    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]
    verbs: tuple[str, ...]

    @cached_property
    def pairs(self) -> SortedPairs:
        """All "adjective-noun" strings, sorted: the keys of the needles."""
        return SortedPairs(self.adjectives, self.nouns)

    @cached_property
    def words(self) -> list[str]:
        """All words once, sorted."""
        return sorted({*self.nouns, *self.adjectives, *self.verbs})


@cache
def own_lists() -> WordLists:
    """The lists this project ships."""
    words = own_words()
    return WordLists(adjectives=words.adjectives, nouns=words.nouns, verbs=words.verbs)


@cache
def official_lists() -> WordLists:
    """The lists of package wonderwords 3.0.1. ValueError if that version is not installed."""
    try:
        found = version("wonderwords")
    except PackageNotFoundError:
        found = None
    if found != WONDERWORDS:
        raise ConfigError(
            "official",
            True,
            why=f"draws from the word lists of wonderwords=={WONDERWORDS}, found {found or 'none'}: "
            "pip install 'kvbench[ruler]'",
        )
    spec = find_spec("wonderwords")
    assert spec is not None
    assert spec.origin is not None
    assets = Path(spec.origin).parent / "assets"
    lists = ((assets / f"{kind}list.txt").read_text(encoding="utf-8") for kind in ("adjective", "noun", "verb"))
    return WordLists(*(tuple(line.rstrip() for line in text.splitlines()) for text in lists))


@cache
def own_compounds() -> list[str]:
    """Closed compounds of our own words, sorted: what common words are drawn from where single ones are too few."""
    lists = own_lists()
    return sorted({adjective + noun for adjective in lists.adjectives for noun in lists.nouns})


@cache
def official_second_list(data_dir: str | None) -> list[str]:
    """RULER's `english_words.json`, in file order. ValueError if it is not in `data_dir`."""
    path = Path(data_dir or ".") / "english_words.json"
    if data_dir is None or not path.is_file():
        raise ConfigError(
            "data_dir",
            data_dir,
            why="has no english_words.json, which official=True needs at this length: "
            "fetch NVIDIA/RULER's scripts/data/synthetic/json/english_words.json (git LFS)",
        )
    return list(json.loads(path.read_text(encoding="utf-8")).values())
