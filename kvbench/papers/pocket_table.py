"""A table of a paper in its own layout, every number measured on the pocket model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import nan
from statistics import fmean

from kvbench.analysis.result import Result
from kvbench.papers import arrangement, pocket
from kvbench.papers.arrangement import Arrangement
from kvbench.papers.choice import Choice
from kvbench.papers.layout import grid_of
from kvbench.papers.matching import Measured, Runs, measured
from kvbench.papers.protocol import SCHEDULE, Plan, runs_of
from kvbench.papers.published import Number
from kvbench.report.grid import Grid
from kvbench.terminal.errors import UsageError

MEAN = "|mean"
HELD = ("held|tokens", "held|KiB")
Row = dict[str, Plan]  # title of a stand-in -> its run


def rows_of(name: str, choice: Choice) -> dict[Number, Row]:
    """A number for each row of the pocket table, and its runs. UsageError where nothing stands in for a table's tasks.

    Models of the paper become one, and so do tasks with the same stand-ins.
    """
    rows: dict[tuple[object, ...], tuple[Number, Row]] = {}
    for number in choice.numbers(name):
        for plan in (short for own in runs_of(number) for short in pocket.scaled(own)):
            budget = plan.budget if number.budget_kind != "bits" else number.budget
            place = number.table, number.method, budget
            about = replace(number, model="", budget=budget, task="", metric="score", value=nan, note="")
            rows.setdefault(place, (about, {}))[1].setdefault(pocket.title(plan), plan)
    if not rows:
        raise UsageError(f"{name} has nothing that the pocket model can stand in for: see results/paper/pocket.yaml")
    return dict(rows.values())


def pocket_runs(name: str, choice: Choice) -> list[Plan]:
    """The runs of a pocket table, each once."""
    return [plan for row in rows_of(name, choice).values() for plan in row.values()]


def pocket_table(name: str, choice: Choice, runs: Sequence[Result]) -> Grid:
    """What the runs measured, in the paper's layout. Raises UsageError where there is no run of it."""
    rows, known = rows_of(name, choice), Runs(runs)
    found = {about: _measured(row, known) for about, row in rows.items()}
    numbers = [number for about, got in found.items() for number in _numbers(about, got)]
    command = f"python -m kvbench.tables run {name} scale=pocket"
    if not numbers:
        raise UsageError(f"{name} was not run on the pocket model: {command}")
    grid = grid_of(name, _arrangement(name, choice, rows), numbers)
    examples = sorted({one.n for got in found.values() for one in got.values()})
    missing = sum(len(row) - len(found[about]) for about, row in rows.items())
    plans = [plan for number in choice.numbers(name) for plan in runs_of(number)]
    said = [
        f"Every number is of the {pocket.MODEL}: score in percent (95% interval), "
        f"{' or '.join(map(str, examples))} examples each.",
        *([f"{missing} runs are missing: {command}"] if missing else []),
        *pocket.about(plans),
        *_rules([plan for row in rows.values() for plan in row.values()]),
    ]
    return replace(grid, notes=tuple(("", sentence) for sentence in said))


def _rules(plans: Sequence[Plan]) -> list[str]:
    """When the runs evict, where the paper says so: `schedule=blocks, block=32, decode=evict.`"""
    found = (", ".join(f"{key}={plan.settings[key]}" for key in SCHEDULE if key in plan.settings) for plan in plans)
    grown = "decode=grow: new tokens are kept beside the budget"
    return [f"{words.replace('decode=grow', grown)}." for words in dict.fromkeys(found) if words]


def _measured(row: Row, runs: Runs) -> dict[str, Measured]:
    found = {}
    for title, plan in row.items():
        run, _ = runs.find(plan)
        if run is not None and not isinstance(got := measured(plan, run), str):
            found[title] = got
    return found


def _numbers(about: Number, got: dict[str, Measured]) -> Iterator[Number]:
    """The numbers of a row: each stand-in, their mean, and the tokens and bytes held."""
    for title, one in got.items():
        yield replace(about, task=title, value=one.value, printed=_score(one))
    if got:
        alike = [(one.value, one.kept, one.nbytes / 2**10) for one in got.values()]  # each stand-in weighs the same
        for what, values in zip((MEAN, *HELD), zip(*alike, strict=True), strict=True):
            if what != MEAN or len(got) > 1:
                yield replace(about, task=what, printed=f"{fmean(values):.0f}")


def _score(one: Measured) -> str:
    return f"{one.value:.0f}" + ("" if one.low is None else f" ({one.low:.0f}-{one.high:.0f})")


def _budgets(name: str, choice: Choice) -> dict[str, str]:
    """What is printed of a budget: ours, and the paper's beside it."""
    pairs = {
        (short.budget, number.budget)
        for number in choice.numbers(name)
        for own in runs_of(number)
        for short in pocket.scaled(own)
        if isinstance(short.budget, int)
    }
    return {str(ours): f"{ours} ({theirs} in the paper)" for ours, theirs in pairs}


def _arrangement(name: str, choice: Choice, rows: dict[Number, Row]) -> Arrangement:
    """The paper's rows and blocks; its columns are the stand-ins, and nothing is marked: intervals are wide."""
    own = arrangement.arrangement(name)
    blocks = {about.table: next(iter(row.values())).settings.get("block") for about, row in rows.items()}
    by_table = {table: f"blocks of {block} prompt tokens" for table, block in blocks.items()}
    labels = {**own.labels, "table": by_table, "budget": _budgets(name, choice)}
    return Arrangement(
        title=f"{pocket.MODEL}: {own.title}",
        section=own.section,
        columns=("test", "what"),
        split={"task": r"(?P<test>.*)\|(?P<what>.*)"},
        blocks=("table",) if own.parts else None,
        complete=False,
        labels={key: dict(words) for key, words in labels.items()},
    )
