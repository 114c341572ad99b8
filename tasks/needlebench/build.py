"""NeedleBench's prompts: haystack lines in the order of a repeat, needles at token positions.

Token lists are of the tokenizer that lengths are counted in. c: number of the repeat, which seeds every draw.
Source: open-compass/opencompass at a5acc4b, opencompass/datasets/needlebench/{origin,parallel,multi}.py; v2 likewise.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from kvbench.tasks.task import Tokenizer
from kvbench.tasks.text_files import shipped

T = TypeVar("T")
JOIN = "、"  # between questions, in English prompts too
_MARKS = {"en": "Please answer in the format", "zh": "请按照"}
_ENDS = {"en": ("?", "."), "zh": ("？", "。")}
_GUIDED = {"en": " ", "zh": ""}  # what stands between the guiding sentence and the format request


def texts(v2: bool, language: str) -> dict[str, Any]:
    """Prompt templates by sub-task (slots context, question; v2's reasoning also last_person), and more.

    v1: guide, the sentence before the format request. v2: ancestor_question, relations and relatives, from which family
    chains are told. `tasks/data/needlebench_templates.json` names source and licence.
    """
    found: dict[str, Any] = shipped("needlebench_templates.json")["v2" if v2 else "v1"][language]
    return found


class Haystack:
    """The lines of one file, encoded once. Every repeat shuffles the order that the repeat before it left behind."""

    def __init__(self, lines: Sequence[str], tokenizer: Tokenizer) -> None:
        self._lines = lines
        self._tokenizer = tokenizer
        self._encoded: dict[int, list[int]] = {}
        self._orders: list[list[int]] = []

    def first(self, c: int, size: int) -> list[int]:
        """The first `size` tokens in repeat c; fewer where the file has no more."""
        taken: list[int] = []
        for line in self._order(c):
            if line not in self._encoded:
                self._encoded[line] = self._tokenizer.encode(self._lines[line])
            taken += self._encoded[line]
            if len(taken) >= size:
                break
        return taken[: max(size, 0)]

    def _order(self, c: int) -> list[int]:
        while len(self._orders) <= c:
            order = list(self._orders[-1] if self._orders else range(len(self._lines)))
            random.Random(len(self._orders)).shuffle(order)
            self._orders.append(order)
        return self._orders[c]


def drawn(items: Sequence[T], c: int) -> T:
    """One item for repeat c."""
    return random.Random(c).choice(items)


def shuffled(items: Sequence[T], c: int) -> list[T]:
    """All items in the order of repeat c."""
    order = list(items)
    random.Random(c).shuffle(order)
    return order


def needle_set(
    needles: Sequence[Mapping[str, str]], count: int, language: str, rng: random.Random
) -> list[Mapping[str, str]]:
    """`count` needles of a language with different arg1 and different arg2: the first in a random order of all.

    needles: both languages, because the official code shuffles before it looks at the language. Raises ValueError where
    there are too few.
    """
    order = list(needles)
    rng.shuffle(order)
    taken: list[Mapping[str, str]] = []
    for needle in order:
        if needle["language"] == language and all(needle[k] != other[k] for other in taken for k in ("arg1", "arg2")):
            taken.append(needle)
        if len(taken) == count:
            return taken
    raise ValueError(f"needles.jsonl has only {len(taken)} different {language} needles, {count} depths need one each")


def place_at_depths(haystack: list[int], needles: Sequence[list[int]], depths: Sequence[int]) -> list[int]:
    """Needle i at depths[i], which rise."""
    places = [int(len(haystack) * (depth / 100)) for depth in depths]
    before = accumulate((len(needle) for needle in needles), initial=0)
    whole = haystack
    for place, shift, needle in zip(places, before, needles, strict=False):
        at = min(place + shift, len(whole))
        whole = whole[:at] + needle + whole[at:]
    return whole


def place_spaced(haystack: list[int], needles: Sequence[list[int]], depth: int, spacing: int) -> list[int]:
    """The first needle at `depth` percent, every next one `spacing` percent further.

    The official code counts the needles before a place twice, and so does this.
    """
    size = len(haystack)
    places: list[int] = []
    for i in range(len(needles)):
        start = int(size * (depth / 100)) if i == 0 else int(places[-1] + len(needles[i - 1]) + size * (spacing / 100))
        places.append(min(start, size + sum(len(needle) for needle in needles[:i])))
    whole, shift = haystack, 0
    for place, needle in zip(places, needles, strict=True):
        whole = whole[: place + shift] + needle + whole[place + shift :]
        shift += len(needle)
    return whole


def guided(question: str, language: str) -> str:
    """v1: the question with a sentence that asks to think first, before its request for a format."""
    mark = _MARKS[language]
    parts = question.split(mark)
    guide: str = texts(False, language)["guide"]
    return parts[0] + guide + _GUIDED[language] + mark + parts[1]


def joined_question(questions: Sequence[str], language: str) -> str:
    """One question out of several, with one request for a format."""
    asks, ends = _ENDS[language]
    asked = JOIN.join(question.split(asks)[0] + asks for question in questions)
    form = JOIN.join(question.split("'")[1].split(ends)[0] for question in questions)
    return (
        f"{asked}Please answer in the format of '{form}'" if language == "en" else f"{asked}请按照'{form}'的格式回答。"
    )


def family(names: Sequence[str], count: int, c: int, language: str) -> tuple[list[str], str, str]:
    """v2: (needles that tell a chain of `count` relations, its eldest, its youngest), drawn for repeat c."""
    rng, told = random.Random(c), texts(True, language)
    chain = rng.sample(names, count + 1)
    needles = []
    for elder, younger in pairwise(chain):
        relation, relative = rng.choice(told["relations"]), rng.choice(told["relatives"])
        needles.append(relation.format(A=elder, B=younger, relationship=relative))
    rng.shuffle(needles)
    return needles, chain[0], chain[-1]
