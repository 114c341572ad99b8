"""Examples of a report: prompt, references, answers, and the tokens of the prompt that each policy kept."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from kvbench.report.html.prompts import Passage, prompts_of
from kvbench.results.kept import counts
from kvbench.results.metrics import mean_kept
from kvbench.results.result import Result
from kvbench.results.samples import Sample

SHOWN = 25  # examples of a task
MOST_BYTES = 10_000_000  # approximate limit of all examples of a report
LONGEST = 1_500  # characters of an answer or a reference
LEVELS = 4  # shades of a kept token, from one head to all heads

Span = tuple[int, str]  # shade from 0 (no head keeps it) to LEVELS (all heads do), and text


class Answer(NamedTuple):
    """The answer of a run. kept: mean tokens held per KV head. spans: shaded text of each passage, if recorded."""

    row: Result
    sample: Sample
    text: str
    kept: float | None
    spans: tuple[tuple[Span, ...], ...] = ()


class Shown(NamedTuple):
    """One example. passages: parts of its prompt; empty if the prompt cannot be built again."""

    sample: Sample
    about: str
    references: tuple[str, ...]
    passages: tuple[Passage, ...]
    answers: tuple[Answer, ...]


class Examples(NamedTuple):
    """The first examples of a model and task. notes: omitted examples, and the reason for missing prompts."""

    title: str
    shown: list[Shown]
    notes: list[str]


def examples(rows: Sequence[Result]) -> list[Examples]:
    """One entry for each model and task."""
    settings: dict[tuple[str, ...], list[Result]] = {}
    for row in rows:
        if row.samples:
            settings.setdefault(row.setting, []).append(row)
    nbytes = sum(len(one.output or "") + 500 for row in rows for one in row.samples[:SHOWN])
    many = max(1, min(SHOWN, SHOWN * MOST_BYTES // max(1, nbytes)))
    return [_examples(group, many) for group in settings.values()]


def _examples(rows: Sequence[Result], many: int) -> Examples:
    longest = max(rows, key=lambda row: len(row.samples))
    prompts = prompts_of(longest, many)
    shown = []
    for place, sample in enumerate(longest.samples[:many]):
        passages = prompts.shown.get(sample.prompt_hash, ())
        same = [(row, row.samples[place]) for row in rows if place < len(row.samples)]
        answers = [_answer(row, one, passages) for row, one in same if one.prompt_hash == sample.prompt_hash]
        known = {k: v for k, v in sample.metadata.items() if isinstance(v, str | int | float) and len(str(v)) <= 60}
        about = ", ".join(f"{key} {value}" for key, value in known.items())
        shown.append(Shown(sample, about, tuple(map(_short, sample.references)), passages, tuple(answers)))
    n, of = len(shown), len(longest.samples)
    notes = [f"The first {n} of {of} examples; samples.jsonl has all."] if n < of else []
    notes += [prompts.reason] if prompts.reason else []
    return Examples(f"{longest.task_label} ({longest.model_label})", shown, notes)


def _answer(row: Result, sample: Sample, passages: Sequence[Passage]) -> Answer:
    text = sample.output or ""
    if sample.error is not None:
        text = f"failed: {sample.error}"
    elif sample.likelihood is not None:
        text = f"NLL {sample.likelihood.nll:.5f}"
    elif sample.divergence is not None:
        text = f"KL {sample.divergence.mean_kl:.3g}: {sample.divergence.answer}"
    elif not text.strip():
        text = repr(text)  # a blank answer is visible
    spans: tuple[tuple[Span, ...], ...] = ()
    if sample.kept_heads and sample.kept_tokens:
        kept, heads = counts(sample.kept_heads), sum(map(len, sample.kept_tokens))
        levels = [0 if not count else max(1, round(LEVELS * count / heads)) for count in kept]
        spans = tuple(_spans(one, levels[one.start : one.start + len(one.tokens)]) for one in passages)
    return Answer(row, sample, _short(text), mean_kept(sample), spans)


def _spans(passage: Passage, levels: Sequence[int]) -> tuple[Span, ...]:
    """Joins neighbouring tokens of the same shade."""
    joined = groupby(zip(levels, passage.tokens, strict=True), key=lambda pair: pair[0])
    return tuple((level, "".join(token for _, token in group)) for level, group in joined)


def _short(text: str) -> str:
    """At most `LONGEST` characters, with the number of the others."""
    more = len(text) - LONGEST
    return text if more <= 0 else f"{text[:LONGEST]} … [{more:,} more characters]"
