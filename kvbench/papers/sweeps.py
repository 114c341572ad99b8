"""The runs behind a published table, as the few sweeps they divide into: those of `conf/experiment/<paper>/`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

from kvbench.config.sweeps import word
from kvbench.papers.lost import printed_cells
from kvbench.papers.protocol import Cannot, Plan, plan, runs_of
from kvbench.papers.published import Number

AXES = ("model", "policy", "budget", "task")
Point = tuple[Any, ...]  # a value for each of AXES


@dataclass(frozen=True)
class PlannedSweep:
    """Runs that differ in `AXES` alone, every combination of them. sources: field -> where the paper says so."""

    axes: tuple[tuple[Any, ...], ...]
    settings: Mapping[str, Any]
    sources: Mapping[str, str]

    @property
    def points(self) -> Iterable[Point]:
        """(model, policy, budget, task) of every run."""
        return product(*self.axes)


@cache
def planned_runs(name: str) -> tuple[Plan, ...]:
    """The runs of a table, one for all numbers that need the same, in the order of the print.

    Numbers that the text of the paper has lost are asked for too: the paper ran them. Raises UsageError for an unknown
    table.
    """
    found: dict[object, Plan] = {}
    for number in printed_cells(name):
        for one in runs_of(number):
            found.setdefault((_point(one), _settings(one)), one)
    return tuple(found.values())


def sweeps(name: str) -> list[PlannedSweep]:
    """The runs of a table in sweeps: one for every difference in settings, more where it is no product."""
    alike: dict[object, list[Plan]] = {}
    for one in planned_runs(name):
        alike.setdefault(_settings(one), []).append(one)
    return [
        PlannedSweep(axes, plans[0].settings, plans[0].sources)
        for plans in alike.values()
        for axes in _products([_point(one) for one in plans])
    ]


def refused(name: str) -> dict[str, list[Number]]:
    """Why numbers of a table cannot be run, and which."""
    reasons: dict[str, list[Number]] = {}
    for number in printed_cells(name):
        if isinstance(own := plan(number), Cannot):
            reasons.setdefault(own.reason, []).append(number)
    return reasons


def _point(one: Plan) -> Point:
    return one.model, one.policy, one.budget, one.task


def _settings(one: Plan) -> tuple[tuple[str, str], ...]:
    return tuple((key, word(value)) for key, value in one.settings.items())


def _products(points: Sequence[Point]) -> list[tuple[tuple[Any, ...], ...]]:
    """The points as a few products of values: by the axis along which they fall apart into fewest."""
    axes = tuple(tuple(dict.fromkeys(values)) for values in zip(*points, strict=True))
    if len(set(product(*axes))) == len(set(points)):
        return [axes]
    tries = [_apart(points, axis) for axis, values in enumerate(axes) if len(values) > 1]
    return min(tries, key=len)


def _apart(points: Sequence[Point], axis: int) -> list[tuple[tuple[Any, ...], ...]]:
    """Products of the points of each value of an axis; values with the same others stay together."""
    others: dict[Any, list[Point]] = {}
    for point in points:
        others.setdefault(point[axis], []).append((*point[:axis], *point[axis + 1 :]))
    together: dict[frozenset[Point], list[Any]] = {}
    for value, rest in others.items():
        together.setdefault(frozenset(rest), []).append(value)
    found = []
    for values in together.values():
        rest = _products(others[values[0]])
        found += [(*axes[:axis], tuple(values), *axes[axis:]) for axes in rest]
    return found
