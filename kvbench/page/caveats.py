"""What a reader must know before trusting a comparison, the worst first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvbench.analysis.result import Result
from kvbench.analysis.statistics import FEWEST
from kvbench.identity.environment import machine
from kvbench.page.tables import Group, budget_text

MEMORY = 1.1  # a warning above this ratio of the bytes that two policies hold at one budget


@dataclass(frozen=True)
class Caveat:
    """A warning and the runs it is about. level: `broken` (a number is missing), `care`, or `note`."""

    level: str
    title: str
    text: str
    where: tuple[str, ...]


def called(row: Result) -> str:
    """A run in words: policy, budget, task, and model."""
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
            "Their numbers are those of the examples so far. The same command continues them.",
            tuple(f"{called(row)}: {row.n} examples" for row in rows if not row.finished),
        ),
        Caveat(
            "care",
            "Versions mixed within a run",
            "Such a run measures neither version.",
            tuple(f"{called(row)}: {row.mixed}" for row in rows if row.mixed),
        ),
        Caveat(
            "care",
            "Different schedules or decoding rules",
            "They are different experiments, so their runs are compared in groups of their own.",
            _several(rows, lambda row: row.when if row.evicts else ""),
        ),
        Caveat(
            "care",
            "Not the same examples for all",
            "Differences are taken over the examples that both runs have; the scores are not.",
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
            "The budget is larger than every prompt, so this is the full cache under another name.",
            tuple(called(row) for row in rows if row.evicts and row.evicted_share == 0),
        ),
        Caveat(
            "note",
            "The same budget is not the same memory",
            "A budget counts tokens; statistics, positions and tokens kept while decoding take bytes too.",
            tuple(_memory(groups)),
        ),
        Caveat(
            "note",
            "The full cache was not run",
            "Run policy=full on the same examples to see what compression costs.",
            tuple(
                dict.fromkeys(f"{r.task_label} ({r.model_label})" for r in rows if not r.is_full and r.baseline is None)
            ),
        ),
        Caveat(
            "note",
            "Several revisions or machines",
            "Code may have changed between these runs, and their seconds do not compare.",
            _several(rows, lambda row: f"{row.environment['kvbench_revision']}, {machine(row.environment)}"),
        ),
    ]
    return [caveat for caveat in found if caveat.where]


def _failed(rows: Sequence[Result]) -> Iterator[str]:
    for row in rows:
        lost = [sample for sample in row.samples if sample.error is not None]
        if lost:
            first = f"example {lost[0].index}: {lost[0].error}"
            yield f"{called(row)}: {len(lost)} of {row.n} examples failed; {first}"


def _examples(rows: Sequence[Result]) -> Iterator[str]:
    settings: dict[tuple[str, ...], list[Result]] = {}
    for row in rows:
        settings.setdefault(row.setting, []).append(row)
    for own in settings.values():
        sizes = [row.n for row in own]
        if len({tuple(sample.prompt_hash for sample in row.samples) for row in own}) > 1:
            many = f"{min(sizes)} to {max(sizes)}" if min(sizes) < max(sizes) else f"{sizes[0]} different"
            yield f"{_about(own[0])}: {many} examples"


def _memory(groups: Sequence[Group]) -> Iterator[str]:
    for group in groups:
        held = {row: row.cache_bytes for row in group.rows if row.cache_bytes and row.budget is not None}
        if held and max(held.values()) > MEMORY * min(held.values()):
            least, most = min(held, key=held.__getitem__), max(held, key=held.__getitem__)
            yield f"{group.title}: {most.name} holds {held[most] / held[least]:.2f}x the bytes of {least.name}"


def _several(rows: Sequence[Result], value: Callable[[Result], str]) -> tuple[str, ...]:
    """The values and how many runs have each; nothing if all have the same."""
    values = [found for row in rows if (found := value(row))]
    counts = {one: values.count(one) for one in dict.fromkeys(values)}
    return tuple(f"{one}: {many} run{'s' * (many > 1)}" for one, many in counts.items()) if len(counts) > 1 else ()
