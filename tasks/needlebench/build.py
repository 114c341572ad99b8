"""NeedleBench's prompts: haystack lines in the order of a repeat, needles at token positions.

Token lists use the tokenizer in which lengths are counted. c: number of the repeat, which seeds every draw.
Source: open-compass/opencompass at a5acc4b, opencompass/datasets/needlebench/{origin,parallel,multi}.py; v2 likewise.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from kvbench.tasks.task import Tokenizer
from kvbench.tasks.words import shipped

T = TypeVar("T")
JOIN = "、"  # between questions, also in English prompts
_MARKS = {"en": "Please answer in the format", "zh": "请按照"}
_ENDS = {"en": ("?", "."), "zh": ("？", "。")}
_GUIDED = {"en": " ", "zh": ""}  # between the guiding sentence and the format request


def texts(v2: bool, language: str) -> dict[str, Any]:
    """Prompt templates by sub-task (slots context, question; v2's reasoning also last_person), and further texts.

    v1: guide, the sentence before the format request. v2: ancestor_question, relations and relatives for family chains.
    `tasks/data/needlebench_templates.json` names source and licence.
    """
    found: dict[str, Any] = shipped("needlebench_templates.json")["v2" if v2 else "v1"][language]
    return found


class Haystack:
    """The lines of one file, encoded once. Every repeat shuffles the order of the previous repeat."""

    def __init__(self, lines: Sequence[str], tokenizer: Tokenizer) -> None:
        self._lines = lines
        self._tokenizer = tokenizer
        self._encoded: dict[int, list[int]] = {}
        self._orders: list[list[int]] = []

    def first(self, c: int, size: int) -> list[int]:
        """The first `size` tokens in repeat c; fewer if the file has fewer."""
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
    """The first `count` needles of a language, in a random order of all, with different arg1 and different arg2.

    needles: both languages, because the official code shuffles before it selects the language. Raises ValueError if
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
    """The haystack with needle i at depths[i]; depths are ascending."""
    places = [int(len(haystack) * (depth / 100)) for depth in depths]
    before = accumulate((len(needle) for needle in needles), initial=0)
    whole = haystack
    for place, shift, needle in zip(places, before, needles, strict=False):
        at = min(place + shift, len(whole))
        whole = whole[:at] + needle + whole[at:]
    return whole


def place_spaced(haystack: list[int], needles: Sequence[list[int]], depth: int, spacing: int) -> list[int]:
    """The haystack with the first needle at `depth` percent, and each next one `spacing` percent further.

    As in the official code, the needles before a position are counted twice.
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
    """v1: the question with a sentence that requests thinking first, before the request for a format."""
    mark = _MARKS[language]
    parts = question.split(mark)
    guide: str = texts(False, language)["guide"]
    return parts[0] + guide + _GUIDED[language] + mark + parts[1]


def joined_question(questions: Sequence[str], language: str) -> str:
    """Several questions joined into one, with one request for a format."""
    mark, ends = _ENDS[language]
    joined = JOIN.join(question.split(mark)[0] + mark for question in questions)
    form = JOIN.join(question.split("'")[1].split(ends)[0] for question in questions)
    return (
        f"{joined}Please answer in the format of '{form}'"
        if language == "en"
        else f"{joined}请按照'{form}'的格式回答。"
    )


def family(names: Sequence[str], count: int, c: int, language: str) -> tuple[list[str], str, str]:
    """v2: (needles of a chain of `count` relations, its eldest, its youngest), drawn for repeat c."""
    rng, phrases = random.Random(c), texts(True, language)
    chain = rng.sample(names, count + 1)
    needles = []
    for elder, younger in pairwise(chain):
        relation, relative = rng.choice(phrases["relations"]), rng.choice(phrases["relatives"])
        needles.append(relation.format(A=elder, B=younger, relationship=relative))
    rng.shuffle(needles)
    return needles, chain[0], chain[-1]
