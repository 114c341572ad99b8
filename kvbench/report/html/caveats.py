"""Caveats of a report: warnings about its runs, the most serious first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvbench.report.html.tables import Group, budget_text
from kvbench.results.environment import machine
from kvbench.results.result import Result
from kvbench.results.statistics import FEWEST

MEMORY = 1.1  # two policies with the same budget cause a note if their bytes differ by more than this ratio


@dataclass(frozen=True)
class Caveat:
    """A warning and the runs it concerns. level: `broken` (a number is missing), `care`, or `note`."""

    level: str
    title: str
    text: str
    where: tuple[str, ...]


def called(row: Result) -> str:
    """A label of a run: policy, budget, task, and model."""
    at = "" if row.budget is None else f" at {budget_text(row.budget)}"
    return f"{row.name}{at} on {_about(row)}"


def _about(row: Result) -> str:
    return f"{row.task_label} ({row.model_label})"


def caveats(rows: Sequence[Result], groups: Sequence[Group]) -> list[Caveat]:
    """Every warning about these runs."""
    found = [
        Caveat("broken", "Failed examples", "A run with a failed example has no score.", tuple(_failed(rows))),
        Caveat(
            "broken",
            "Unfinished runs",
            "Their numbers include only the finished examples. Run the same command again to continue them.",
            tuple(f"{called(row)}: {row.n} examples" for row in rows if not row.finished),
        ),
        Caveat(
            "care",
            "Versions mixed within a run",
            "Such a run is a measurement of neither version.",
            tuple(f"{called(row)}: {row.mixed}" for row in rows if row.mixed),
        ),
        Caveat(
            "care",
            "Different schedules or decoding rules",
            "These runs are in separate comparison groups, because they are different experiments.",
            _several(rows, lambda row: row.when if row.evicts else ""),
        ),
        Caveat(
            "care",
            "Different examples",
            "Differences use only the examples that both runs have; scores use all examples of a run.",
            tuple(_examples(rows)),
        ),
        Caveat(
            "care",
            f"Fewer than {FEWEST} examples",
            "Too few to compare policies.",
            tuple(called(row) for row in rows if row.n < FEWEST),
        ),
        Caveat(
            "care",
            "Nothing was evicted",
            "The budget is larger than every prompt, so these runs are the same as the full cache.",
            tuple(called(row) for row in rows if row.evicts and row.evicted_share == 0),
        ),
        Caveat(
            "note",
            "The same budget is not the same memory",
            "A budget counts tokens. Statistics, positions and tokens added while decoding also use memory.",
            tuple(_memory(groups)),
        ),
        Caveat(
            "note",
            "The full cache was not run",
            "Run policy=full on the same examples to see how compression changes the score.",
            tuple(
                dict.fromkeys(f"{r.task_label} ({r.model_label})" for r in rows if not r.is_full and r.baseline is None)
            ),
        ),
        Caveat(
            "note",
            "Several revisions or machines",
            "The code may differ between these runs, and their times are not comparable.",
            _several(rows, lambda row: f"{row.environment['kvbench_revision']}, {machine(row.environment)}"),
        ),
    ]
    return [caveat for caveat in found if caveat.where]


def _failed(rows: Sequence[Result]) -> Iterator[str]:
    for row in rows:
        failed = [sample for sample in row.samples if sample.error is not None]
        if failed:
            first = f"example {failed[0].index}: {failed[0].error}"
            yield f"{called(row)}: {len(failed)} of {row.n} examples failed; {first}"


def _examples(rows: Sequence[Result]) -> Iterator[str]:
    settings: dict[tuple[str, ...], list[Result]] = {}
    for row in rows:
        settings.setdefault(row.setting, []).append(row)
    for group in settings.values():
        sizes = [row.n for row in group]
        if len({tuple(sample.prompt_hash for sample in row.samples) for row in group}) > 1:
            count = f"{min(sizes)} to {max(sizes)}" if min(sizes) < max(sizes) else f"{sizes[0]} different"
            yield f"{_about(group[0])}: {count} examples"


def _memory(groups: Sequence[Group]) -> Iterator[str]:
    for group in groups:
        held = {row: row.cache_bytes for row in group.rows if row.cache_bytes and row.budget is not None}
        if held and max(held.values()) > MEMORY * min(held.values()):
            least, most = min(held, key=held.__getitem__), max(held, key=held.__getitem__)
            yield f"{group.title}: {most.name} holds {held[most] / held[least]:.2f}x the bytes of {least.name}"


def _several(rows: Sequence[Result], value: Callable[[Result], str]) -> tuple[str, ...]:
    """Each value with its number of runs; nothing if all runs have the same value."""
    values = [text for row in rows if (text := value(row))]
    counts = {one: values.count(one) for one in dict.fromkeys(values)}
    return tuple(f"{one}: {many} run{'s' * (many > 1)}" for one, many in counts.items()) if len(counts) > 1 else ()
