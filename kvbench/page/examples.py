"""The example browser: what was asked, what was expected, what every policy answered, and where answers differ.

It is cut to a size, never silently: how much of what is said in words beside it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise, zip_longest
from typing import Any

from kvbench.analysis.metrics import mean_kept
from kvbench.analysis.result import Result
from kvbench.page.differences import SAME, pieces
from kvbench.page.prompts import Prompts, Shown, prompts_of
from kvbench.page.rows import budget_words
from kvbench.records.kept_heads import counts
from kvbench.records.sample import Sample

MOST_BYTES = 14_000_000  # of answers and prompts in a page, all together
LONGEST = 1_500  # characters of an answer or a reference
BINS = 240  # of a strip that says which part of a prompt is kept
LEVELS = "0123456789abcdefghijklmnopqrstuvwxyz"  # shares of the heads that keep a token, from none to all
OVERHEAD = 60  # bytes of an answer's numbers
TOKEN = 8  # bytes of a token of a whole prompt; one more for every answer: how many heads keep it

Browsed = dict[str, Any]
Setting = tuple[str, ...]


@dataclass(frozen=True)
class Browser:
    """Groups of examples, one for each model and task, and sentences on what was left out."""

    groups: list[Browsed]
    cut: tuple[str, ...]


def browser(entries: Sequence[Result], most_bytes: int = MOST_BYTES) -> Browser:
    """All examples with all answers, or as many of each task's first ones as fit into `most_bytes`."""
    numbers = {entry: number for number, entry in enumerate(entries)}
    settings: dict[Setting, list[Result]] = {}
    for entry in entries:
        settings.setdefault(entry.setting, []).append(entry)
    sizes = {setting: _sizes(members) for setting, members in settings.items()}
    shown = max(1, _fitting(list(sizes.values()), most_bytes))
    left = most_bytes - sum(sum(own[:shown]) for own in sizes.values())
    tokens = [
        [(TOKEN + len(members)) * sample.prompt_tokens for sample in _longest(members).samples[:shown]]
        for members in settings.values()
    ]
    whole = _fitting(tokens, left)
    groups, cut = [], []
    for setting, members in settings.items():
        found = _group(members, min(shown, len(sizes[setting])), whole)
        found["entries"] = [numbers[entry] for entry in members]
        found["full"] = next((numbers[entry] for entry in members if entry.is_full), None)
        if shown < len(sizes[setting]):
            cut.append(f"{found['title']}: the first {shown} of {len(sizes[setting])} examples")
        groups.append(found)
    return Browser(groups, tuple(cut))


def _sizes(members: Sequence[Result]) -> list[int]:
    """About how many bytes each example takes in the page."""
    sizes = [0] * max(len(entry.samples) for entry in members)
    for entry in members:
        for place, sample in enumerate(entry.samples):
            strip = BINS if sample.kept_heads else 0
            sizes[place] += min(len(sample.output or ""), LONGEST) * 2 + OVERHEAD + strip
    return [size + 3_000 for size in sizes]


def _fitting(groups: Sequence[Sequence[int]], most: float) -> int:
    """How many first examples of every group fit into `most` bytes together. groups: bytes of each example."""
    together = accumulate(sum(column) for column in zip_longest(*groups, fillvalue=0))
    return sum(total <= most for total in together)


def _longest(members: Sequence[Result]) -> Result:
    return max(members, key=lambda e: len(e.samples))


def _group(members: Sequence[Result], kept: int, whole: int) -> Browsed:
    longest = _longest(members)
    prompts = prompts_of(longest, kept)
    full = next((e for e in members if e.is_full), None)
    first = members[0]
    seeds = len({e.identity["seed"] for e in members}) > 1
    return {
        "title": f"{first.task} ({first.model})" + (f", seed {first.identity['seed']}" if seeds else ""),
        "model": first.model,
        "task": first.task,
        "without": prompts.reason,
        "examples": [_example(members, place, longest, full, prompts, place < whole) for place in range(kept)],
    }


def _example(
    members: Sequence[Result], place: int, longest: Result, full: Result | None, prompts: Prompts, in_full: bool
) -> Browsed:
    asked = longest.samples[place]
    shown = prompts.shown.get(asked.prompt_hash)
    if shown is not None and not in_full:
        shown = Shown(tuple(passage for passage in shown.passages if not passage.folded))
    whole = None if full is None else _sample(full, place, asked)
    answers = [_answer(entry, _sample(entry, place, asked), whole, shown) for entry in members]
    return {
        "index": asked.index,
        "about": _about(asked),
        "references": [_short(reference) for reference in asked.references],
        "prompt": None if shown is None else [[p.start, int(p.folded), *p.tokens] for p in shown.passages],
        "length": asked.prompt_tokens,
        "answers": answers,
    }


def _sample(entry: Result, place: int, asked: Sample) -> Sample | None:
    """An entry's sample of the same prompt, where it has one."""
    samples = entry.samples
    return samples[place] if place < len(samples) and samples[place].prompt_hash == asked.prompt_hash else None


def _about(sample: Sample) -> str:
    said = {k: v for k, v in sample.metadata.items() if isinstance(v, str | int | float) and len(str(v)) <= 60}
    return ", ".join(f"{key} {value}" for key, value in said.items())


def _answer(entry: Result, sample: Sample | None, full: Sample | None, shown: Shown | None) -> Browsed | None:
    if sample is None:
        return None
    kept = mean_kept(sample)
    found: Browsed = {"score": sample.score, "kept": kept and round(kept, 1), "bytes": sample.cache_bytes}
    if sample.error is not None:
        found["error"] = _short(sample.error)
    elif sample.likelihood is not None:
        found["nll"] = round(sample.likelihood.nll, 5)
    else:
        found["text"] = _text(sample, None if entry.is_full else full)
    if sample.kept_heads and sample.kept_tokens:
        found |= _colours(sample, shown)
    return {key: value for key, value in found.items() if value is not None}


def _text(sample: Sample, full: Sample | None) -> list[Any]:
    """The answer in pieces: texts both have stand alone, others with their kind."""
    own = _short(sample.output or "")
    if full is None or full.output is None:
        return [own]
    return [words if kind == SAME else [words, kind] for words, kind in pieces(own, _short(full.output))]


def _colours(sample: Sample, shown: Shown | None) -> Browsed:
    """By how many heads tokens are kept: a strip over the whole prompt, and a level for every token that is shown."""
    assert sample.kept_heads is not None
    assert sample.kept_tokens is not None
    levels = _levels(sum(map(len, sample.kept_tokens)))
    kept = counts(sample.kept_heads)
    found: Browsed = {"strip": "".join(levels[most] for most in _binned(kept))}
    if shown is not None:
        spans = [kept[p.start : p.start + len(p.tokens)] for p in shown.passages]
        found["levels"] = [_runs("".join(levels[heads] for heads in span)) for span in spans]
    return found


def _runs(letters: str) -> str:
    """Letters of which long runs are counted: `000000z` as `0{6}z`."""
    return re.sub(r"(.)\1{4,}", lambda run: f"{run[1]}{{{len(run[0])}}}", letters)


def _binned(kept: Sequence[int]) -> list[int]:
    """The most heads that keep any token, in equal parts of the prompt: a lone kept token stays to be seen."""
    bins = min(BINS, len(kept))
    edges = [len(kept) * i // bins for i in range(bins + 1)]
    return [max(kept[start:end]) for start, end in pairwise(edges)]


@cache
def _levels(heads: int) -> str:
    """The level of a token by how many of all heads keep it: none is level 0, all the last, one never shown as none."""
    top = len(LEVELS) - 1
    return LEVELS[0] + "".join(LEVELS[max(1, round(kept / heads * top))] for kept in range(1, heads + 1))


def _short(text: str) -> str:
    """At most `LONGEST` characters, saying what was left out."""
    if len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST]} … [cut here: {len(text) - LONGEST:,} more characters]"


def legend(entries: Sequence[Result]) -> Mapping[str, Browsed]:
    """The labels of every entry in the browser, by its number."""
    return {
        str(number): {
            "policy": e.name,
            "budget": budget_words(e.budget),
            "schedule": e.when,
            "moment": e.moments[0],
            "line": e.line,
        }
        for number, e in enumerate(entries)
    }
