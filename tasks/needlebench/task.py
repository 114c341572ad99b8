"""NeedleBench: three kinds of questions over a grid of lengths and depths."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice, product
from typing import Any, NamedTuple

from kvbench.errors import choice
from kvbench.tasks.evidence import needle_spans
from kvbench.tasks.hub import HubFolder
from kvbench.tasks.needlebench import build, scores
from kvbench.tasks.needlebench.data import NAMED, Files, gpt4_encoding
from kvbench.tasks.needlebench.grids import (
    KINDS,
    LANGUAGES,
    NEEDLES,
    REPEATS,
    SIZES,
    SPACING,
    V1,
    V2,
    Grid,
    spread,
)
from kvbench.tasks.task import Example, Task, Tokenizer, counts, question_part, several

COUNTED_IN = ("gpt-4", "model")


@dataclass(frozen=True)
class Point:
    """What defines one prompt. depth: None for multi retrieval, which uses all depths."""

    kind: str
    language: str
    length: int
    depth: int | None
    repeat: int
    needles: int


@dataclass(frozen=True, kw_only=True)
class NeedleBench(Task):
    """NeedleBench 4k, 8k or 32k: the prompts and scores of autumn 2024 (v1), or of v2.

    size: "4k", "8k" or "32k" tokens. kinds, languages: the kinds of questions and their languages. cells: the number of
    cells (length, depth), evenly spread over the grid (None: all); multi retrieval hides a needle at every depth, once
    per selected length. repeats: the maximum number of prompts per cell and kind, the first of the official 10 (multi
    retrieval 25). needle_seed: seed for the needles of multi retrieval; the official code does not set one. counted_in:
    "gpt-4" counts lengths in tokens of cl100k_base for every model, as in the official code; "model" uses the model's
    tokenizer. encoding_dir: a folder with the file of cl100k_base. data_dir: a folder with NeedleBench's files, which
    replaces the data set on the Hub. source: that data set.
    v2: other prompts and depths, 0 or 100 for single retrieval, family chains for multi reasoning, equal weights.
    Source: open-compass/opencompass at a5acc4b.
    """

    name: str = "needlebench"
    chat: bool = True
    size: str = "4k"
    v2: bool = False
    kinds: tuple[str, ...] = KINDS
    languages: tuple[str, ...] = LANGUAGES
    cells: int | None = None
    repeats: int | None = None
    needle_seed: int = 0
    counted_in: str = "gpt-4"
    encoding_dir: str | None = None
    data_dir: str | None = None
    source: HubFolder | None = None
    max_new_tokens: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("size", self.size, *SIZES)
        choice("counted_in", self.counted_in, *COUNTED_IN)
        several(self, "kinds", *KINDS)
        several(self, "languages", *LANGUAGES)
        counts(self, 1, "cells", "repeats", "max_new_tokens")
        counts(self, 0, "needle_seed")

    @property
    def grid(self) -> Grid:
        """Lengths, depths and buffers of the released configuration."""
        return (V2 if self.v2 else V1)[self.size]

    def points(self) -> Iterator[Point]:
        """All prompts; every cell is used once before any is repeated."""
        cells = spread(self.cells or 10**9, self.grid.lengths, self.grid.depths)
        for repeat in range(self.repeats or max(REPEATS.values())):
            kinds = [kind for kind in self.kinds if repeat < REPEATS[kind]]
            seen: set[int] = set()
            for length, depth in cells:
                for kind, language in product(kinds, self.languages):
                    if kind != "multi_retrieval":
                        counts_of = NEEDLES if kind == "multi_reasoning" else (1,)
                        yield from (Point(kind, language, length, depth, repeat, needles) for needles in counts_of)
                    elif length not in seen:
                        yield Point(kind, language, length, None, repeat, len(self.grid.depths))
                seen.add(length)

    def examples(self, tokenizer: Tokenizer, seed: int, limit: int | None = None) -> Iterator[Example]:
        """See `Task.examples`; the official draws are seeded by the number of the repeat, so `seed` has no effect."""
        counted = _Gpt4(gpt4_encoding(self.encoding_dir)) if self.counted_in == "gpt-4" else tokenizer
        writer = _Writer(self, Files(self.data_dir, self.source), counted)
        for index, point in enumerate(islice(self.points(), limit)):
            prompt, question, gold, needles = writer.write(point)
            metadata = {
                "task": point.kind,
                "benchmark": "needlebench",
                "v2": self.v2,
                "language": point.language,
                "length": point.length,
                "repeat": point.repeat,
                "needles": point.needles,
                "groups": ["language"],
            }
            if point.depth is not None:
                metadata["depth"] = point.depth
            yield Example(
                index=index,
                prompt=prompt,
                references=(gold,),
                max_new_tokens=self.max_new_tokens,
                question=question,
                spans=needle_spans(prompt.removesuffix(question), needles, ()),
                metadata=metadata,
            )

    def score(self, output: str, example: Example) -> float:
        """The official score as a share of 100. The reference is the official gold string."""
        kind, gold = example.metadata["task"], example.references[0]
        if kind == "multi_retrieval":
            return scores.mean_over_depths(scores.multi_retrieval([output], [gold])) / 100
        if kind == "single_retrieval":
            return scores.single_retrieval(output, gold, self.v2) / 100
        return (scores.boxed_answer if self.v2 else scores.multi_reasoning)(output, gold) / 100


@dataclass(frozen=True)
class _Gpt4:
    """tiktoken's encoding as a `Tokenizer`."""

    encoding: Any  # a tiktoken.Encoding

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.encoding.encode(text, disallowed_special=())
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self.encoding.decode(ids)
        return text


class Written(NamedTuple):
    """One prompt, the question at its end, the official gold string, and the needles."""

    prompt: str
    question: str
    gold: str
    needles: Sequence[str]


class _Writer:
    """Writes prompts and gold strings; files are read and lines encoded once."""

    def __init__(self, task: NeedleBench, files: Files, tokenizer: Tokenizer) -> None:
        self._task, self._files, self._tokenizer = task, files, tokenizer
        self._haystack: Callable[[str], build.Haystack] = cache(
            lambda language: build.Haystack(files.haystack(language), tokenizer)
        )
        self._reasoning = cache(files.reasoning)
        self._names = cache(files.names)

    def write(self, point: Point) -> Written:
        """Write one prompt."""
        write: Callable[[Point], Written] = getattr(self, f"_{point.kind}")
        return write(point)

    def _single_retrieval(self, point: Point) -> Written:
        ours = [needle for needle in self._files.needles if needle["language"] == NAMED[point.language]]
        needle = build.drawn(ours, point.repeat)
        text = f"\n{needle['needle']}\n"
        context = self._context(point, [text])
        question = needle["retrieval_question"]
        return Written(*self._prompt(point, context, question), f"{text}*{needle['arg2']}", [needle["needle"]])

    def _multi_retrieval(self, point: Point) -> Written:
        rng = random.Random(self._task.needle_seed + point.length)
        taken = build.needle_set(self._files.needles, point.needles, NAMED[point.language], rng)
        taken = build.shuffled(taken, point.repeat)
        context = self._context(point, [f"\n{needle['needle']}\n" for needle in taken])
        question = build.joined_question([needle["retrieval_question"] for needle in taken], point.language)
        keywords, depths = "*".join(n["arg2"] for n in taken), "*".join(map(str, self._task.grid.depths))
        needles = [needle["needle"] for needle in taken]
        return Written(*self._prompt(point, context, question), f"{keywords}#{depths}", needles)

    def _multi_reasoning(self, point: Point) -> Written:
        if self._task.v2:
            names = self._names(point.language)
            needles, answer, last = build.family(names, point.needles, point.repeat, point.language)
            question = build.texts(True, point.language)["ancestor_question"].format(last_person=last)
        else:
            entry = build.drawn(self._reasoning(point.language, point.needles), point.repeat)
            needles, answer, last, question = entry["derivations"], entry["answer"], "", entry["question"]
        context = self._context(point, [f"\n{needle}\n" for needle in needles])
        gold = answer if self._task.v2 else f"{answer}*{answer}"
        return Written(*self._prompt(point, context, question, last), gold, needles)

    def _context(self, point: Point, needles: Sequence[str]) -> str:
        """The haystack with its needles, length - buffer tokens in total."""
        encoded = [self._tokenizer.encode(needle) for needle in needles]
        free = point.length - self._task.grid.buffer(point.kind, point.language) - sum(map(len, encoded))
        haystack = self._haystack(point.language).first(point.repeat, free)
        if point.depth is None:
            whole = build.place_at_depths(haystack, encoded, self._task.grid.depths)
        else:
            whole = build.place_spaced(haystack, encoded, point.depth, SPACING)
        return self._tokenizer.decode(whole)

    def _prompt(self, point: Point, context: str, question: str, last_person: str = "") -> tuple[str, str]:
        if not self._task.v2:
            retrieval = point.kind != "multi_reasoning"
            guide = build.texts(False, point.language)["guide"]
            question = build.guided(question, point.language) if retrieval else question + guide
        template: str = build.texts(self._task.v2, point.language)[point.kind]
        filled = {"question": question, "last_person": last_person}
        return template.format(context=context, **filled), question_part(template, "{question}").format(**filled)
