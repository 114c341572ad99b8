"""Runs that differ only in their seed, as one result with its spread over the seeds."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from statistics import stdev
from typing import Any, overload

from kvbench.results.metrics import metrics
from kvbench.results.result import Result, numbers
from kvbench.results.samples import Sample
from kvbench.results.summary import Outcome, outcomes_of


class JoinedSamples(Sequence[Sample]):
    """The samples of runs with different seeds, read when they are used.

    A prompt that several seeds have is one prompt with several answers, as with `generation.samples`: its score is
    their mean, so that intervals count prompts. Of a given text, whose likelihood has no seed, the first is kept.
    """

    def __init__(self, runs: Sequence[Sequence[Sample]]) -> None:
        self.runs = tuple(runs)

    def __len__(self) -> int:
        return len(_joined(self))

    def __iter__(self) -> Iterator[Sample]:
        return iter(_joined(self))

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Sample]: ...
    def __getitem__(self, index: Any) -> Any:
        return _joined(self)[index]

    @cached_property
    def outcomes(self) -> tuple[Outcome, ...]:
        """The outcome of every prompt."""
        return outcomes_of(_joined(self))


@lru_cache(maxsize=64)
def _joined(samples: JoinedSamples) -> list[Sample]:
    """The answers prompt by prompt, numbered as those of one run."""
    answers: defaultdict[tuple[str, int], list[Sample]] = defaultdict(list)
    for run in samples.runs:
        seen: Counter[tuple[str, int]] = Counter()
        for sample in run:
            number = sample.sample or 0
            seen[sample.prompt_hash, number] += 1  # a prompt may occur several times in a run
            answers[sample.prompt_hash, seen[sample.prompt_hash, number]].append(sample)
    found: list[Sample] = []
    for group in answers.values():
        own = group[:1] if group[0].likelihood is not None else group
        first = len(found)
        found += [replace(one, index=first + k, sample=k if len(own) > 1 else None) for k, one in enumerate(own)]
    return found


def over_seeds(rows: Iterable[Result]) -> list[Result]:
    """The rows with those that differ only in their seed joined into one, in the order of their first appearance.

    A joined row has the numbers of all answers, `n_seeds`, and `seed_sd`, the standard deviation of the seeds' means.
    Rows stay as they are if all have the same seed, and rows of a table, which have no samples.
    """
    given = list(rows)
    if len({row.identity["seed"] for row in given}) < 2 or not all(row.samples for row in given):
        return given
    groups: defaultdict[str, list[Result]] = defaultdict(list)
    for row in given:
        groups[json.dumps([row.naming, {**row.identity, "seed": None}], sort_keys=True, default=vars)].append(row)
    return [_one(group) for group in groups.values()]


def _one(rows: Sequence[Result]) -> Result:
    rows = sorted(rows, key=lambda row: int(row.identity["seed"]))
    first = rows[0]
    values = [row.value for row in rows if row.value is not None]
    joined = replace(
        first,
        run_id=", ".join(row.run_id for row in rows),
        identity={**first.identity, "seed": None},
        state=next((row.state for row in rows if not row.finished), first.state),
        mixed=next((row.mixed for row in rows if row.mixed), ""),
        seeds=tuple(int(row.identity["seed"]) for row in rows),
        n_seeds=len(rows),
        seed_sd=stdev(values) if len(values) > 1 else None,
    )
    if len(rows) == 1:
        return joined
    samples = JoinedSamples([row.samples for row in rows])
    return replace(joined, samples=samples, **{**numbers(metrics(samples)), "pass_at_k": None})
