"""Our own lists of common English words, from which prompts are generated offline."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True)
class Words:
    """Single lower-case words, each list sorted; no word stands in two lists."""

    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]
    verbs: tuple[str, ...]


@cache
def own_words() -> Words:
    """The lists of `tasks/data/words.json`: 250 adjectives, 700 nouns, 250 verbs, written for this project."""
    lists = json.loads(files("kvbench.tasks").joinpath("data/words.json").read_text(encoding="utf-8"))
    return Words(*(tuple(lists[kind]) for kind in ("adjectives", "nouns", "verbs")))
