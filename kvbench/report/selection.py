"""Which runs a table, a figure or a report has: the options --policy, --task, --model, --budget and --over-seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvbench.errors import UsageError, instead

if TYPE_CHECKING:
    from kvbench.results.result import Result, Results

F = TypeVar("F", bound=Callable[..., Any])
ONLY = {"policy": "policies, besides full", "task": "tasks", "model": "models", "budget": "budgets"}


def selection_options(joined: bool) -> Callable[[F], F]:
    """The options of a command. joined: whether runs that differ only in their seed are one row by default."""

    def add(command: F) -> F:
        shown = "  [default: over seeds]" if joined else "  [default: each seed]"
        about = "Join runs that differ only in their seed into one row, with its spread."
        command = click.option("--over-seeds/--each-seed", default=joined, help=about + shown)(command)
        for field, what in reversed(ONLY.items()):
            command = click.option(f"--{field}", multiple=True, metavar="A,B", help=f"Only these {what}.")(command)
        return command

    return add


def selected(rows: Sequence[Result], options: Mapping[str, Any]) -> Results:
    """The rows that the options select. Raises UsageError for a value that no row has."""
    from kvbench.results.result import Results
    from kvbench.results.seeds import over_seeds

    chosen = choose(rows, **{field: options[field] for field in ONLY})
    return Results(over_seeds(chosen) if options["over_seeds"] else chosen)


def choose(rows: Sequence[Result], **wanted: Sequence[str]) -> list[Result]:
    """Select rows by policy, task, model and budget; an empty list selects all.

    The full cache is always selected, and so are rows without a budget. A policy can be given by its preset or by its
    label. Raises UsageError for a value that no row has.
    """
    chosen = list(rows)
    for field, values in wanted.items():
        names = {row: _names(row, field) for row in rows}
        known = set().union(*names.values())
        values = [one for value in values for one in ([value] if value in known else value.split(","))]
        for value in values:
            if value not in known:
                raise UsageError(f"--{field} {value} is not a value of any run{instead(value, sorted(known))}")
        chosen = [row for row in chosen if not values or _always(row, field) or names[row] & set(values)]
    return chosen


def _names(row: Result, field: str) -> set[str]:
    if field == "budget":
        return set() if row.budget is None else {f"{row.budget:g}"}
    whole = row.line if field == "policy" else str(getattr(row, f"{field}_label"))
    return {whole, whole.partition(" ")[0], whole.partition("(")[0].rstrip()}


def _always(row: Result, field: str) -> bool:
    return (field == "policy" and row.is_full) or (field == "budget" and row.budget is None)
