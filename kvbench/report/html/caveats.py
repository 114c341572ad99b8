"""Caveats of a report: warnings about its runs, the most serious first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from kvbench.errors import counted
from kvbench.report.html.tables import RowGroup, budget_text
from kvbench.results.result import Result
from kvbench.results.session import machine
from kvbench.results.statistics import FEWEST

MEMORY = 1.1  # two policies with the same budget cause a note if their bytes differ by more than this ratio
Where = Iterable[str]


class Caveat(NamedTuple):
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


def caveats(rows: Sequence[Result], groups: Sequence[RowGroup]) -> list[Caveat]:
    """Every warning about these runs."""
    few = f"Fewer than {FEWEST} examples"
    unfinished = "Their numbers include only the finished examples. Run the same command again to continue them."
    other = "These runs are in separate comparison groups, because they are different experiments."
    examples = "Differences use only the examples that both runs have; scores use all examples of a run."
    nothing = "The budget is larger than every prompt, so these runs are the same as the full cache."
    memory = "A budget counts tokens. Statistics, positions and tokens added while decoding also use memory."
    full = "Run policy=full on the same examples to see how compression changes the score."
    machines = "The code may differ between these runs, and their times are not comparable."
    whens = _several(rows, lambda row: row.when if row.evicts else "")
    machines_used = _several(rows, lambda row: f"{row.environment['kvbench_revision']}, {machine(row.environment)}")
    all_kept = (called(row) for row in rows if row.evicts and row.evicted_share == 0)
    found: list[tuple[str, str, str, Where]] = [
        ("broken", "Failed examples", "A run with a failed example has no score.", _failed(rows)),
        (
            "broken",
            "Unfinished runs",
            unfinished,
            (f"{called(r)}: {counted(r.n, 'example')}" for r in rows if not r.finished),
        ),
        (
            *("care", "Versions mixed within a run", "Such a run is a measurement of neither version."),
            (f"{called(row)}: {row.mixed}" for row in rows if row.mixed),
        ),
        ("care", "Different schedules or decoding rules", other, whens),
        ("care", "Different examples", examples, _examples(rows)),
        ("care", few, "Too few to compare policies.", (called(row) for row in rows if row.n < FEWEST)),
        ("care", "Nothing was evicted", nothing, all_kept),
        ("note", "The same budget is not the same memory", memory, _memory(groups)),
        (
            *("note", "The full cache was not run", full),
            dict.fromkeys(_about(row) for row in rows if not row.is_full and row.baseline is None),
        ),
        ("note", "Several revisions or machines", machines, machines_used),
    ]
    return [Caveat(level, title, text, places) for level, title, text, of in found if (places := tuple(of))]


def _failed(rows: Sequence[Result]) -> Iterator[str]:
    for row in rows:
        if row.n_failed:
            failed = [sample for sample in row.samples if sample.error is not None]
            first = f"example {failed[0].index}: {failed[0].error}"
            yield f"{called(row)}: {len(failed)} of {counted(row.n, 'example')} failed; {first}"


def _examples(rows: Sequence[Result]) -> Iterator[str]:
    settings: dict[tuple[str, ...], list[Result]] = {}
    for row in rows:
        settings.setdefault(row.setting, []).append(row)
    for group in settings.values():
        sizes = [row.n for row in group]
        if len({row.prompts for row in group}) > 1:
            count = f"{min(sizes)} to {max(sizes)}" if min(sizes) < max(sizes) else f"{sizes[0]} different"
            yield f"{_about(group[0])}: {count} examples"


def _memory(groups: Sequence[RowGroup]) -> Iterator[str]:
    for group in groups:
        held = {row: row.cache_bytes for row in group.rows if row.cache_bytes and row.budget is not None}
        if held and max(held.values()) > MEMORY * min(held.values()):
            least, most = min(held, key=held.__getitem__), max(held, key=held.__getitem__)
            yield f"{group.title}: {most.name} holds {held[most] / held[least]:.2f}x the bytes of {least.name}"


def _several(rows: Sequence[Result], value: Callable[[Result], str]) -> Iterator[str]:
    """Each value with its number of runs; nothing if all runs have the same value."""
    values = [text for row in rows if (text := value(row))]
    for one in dict.fromkeys(values) if len({*values}) > 1 else ():
        yield f"{one}: {counted(values.count(one), 'run')}"
