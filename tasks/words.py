"""Word lists for generated prompts: our own, or the lists of RULER's official generators."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from kvbench.errors import ConfigError
from kvbench.tasks.text_files import shipped

WONDERWORDS = "3.0.1"  # 2.2.0 differs by four nouns, which changes every sample drawn after them


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
        raise ConfigError(
            "official",
            True,
            why=f"draws from the word lists of wonderwords=={WONDERWORDS}, found {found}: pip install 'kvbench[ruler]'",
        )
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
