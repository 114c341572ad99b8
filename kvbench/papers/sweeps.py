"""Planned runs as the few sweeps they divide into: command lines, and the sweeps of `conf/experiment/<paper>/`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from kvbench.papers import arrangement
from kvbench.papers.protocol import Plan, runs_of
from kvbench.papers.published import Number

SWEPT = ("model", "policy", "budget", "task")
Point = tuple[Any, ...]  # a value for each of SWEPT
Key = tuple[Point, tuple[tuple[str, str], ...]]


@dataclass(frozen=True)
class PlannedSweep:
    """Runs that differ in `SWEPT` alone, every combination of them. sources: field -> where the paper says so."""

    axes: tuple[tuple[Any, ...], ...]
    settings: Mapping[str, Any]
    sources: Mapping[str, str]

    @property
    def words(self) -> list[str]:
        """The sweep as the command line has it; LongBench's 16 tasks have one name."""
        axes = dict(zip(SWEPT, self.axes, strict=True))
        if set(axes["task"]) == {f"longbench/{name}" for name in arrangement.names().categories}:
            axes["task"] = ("longbench",)
        swept = [f"{key}={','.join(map(str, values))}" for key, values in axes.items() if values != (None,)]
        several = any(len(values) > 1 for values in axes.values())
        return [*(["-m"] if several else []), *swept, *(f"{key}={word(value)}" for key, value in self.settings.items())]

    @property
    def grid(self) -> dict[str, Any]:
        """The sweep as `hydra.sweeper.grids` has it."""
        axes = {key: list(values) for key, values in zip(SWEPT, self.axes, strict=True) if values != (None,)}
        single = {
            key: [list(value)] if isinstance(value, list | tuple) else value for key, value in self.settings.items()
        }
        return {**axes, **single}

    @property
    def keys(self) -> list[Key]:
        """Of every run."""
        return [(point, _settings(self.settings)) for point in product(*self.axes)]

    @property
    def command(self) -> list[str]:
        """The words of its command line."""
        return ["python", "-m", "kvbench", *self.words]


def word(value: Any) -> str:  # noqa: ANN401 - whatever YAML holds
    """A value as the command line has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{','.join(map(word, value))}]" if isinstance(value, list | tuple) else str(value)


def key_of(one: Plan) -> Key:
    """What tells a run apart from others."""
    return (one.model, one.policy, one.budget, one.task), _settings(one.settings)


def _settings(fields: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple((key, word(value)) for key, value in fields.items())


def planned_runs(numbers: Iterable[Number]) -> list[Plan]:
    """The runs that some numbers need, each once."""
    found: dict[Key, Plan] = {}
    for number in numbers:
        for one in runs_of(number):
            found.setdefault(key_of(one), one)
    return list(found.values())


def in_sweeps(plans: Iterable[Plan]) -> list[PlannedSweep]:
    """The runs in sweeps: one for every difference in settings, more where it is no product."""
    alike: dict[object, list[Plan]] = {}
    for one in plans:
        alike.setdefault(key_of(one)[1], []).append(one)
    return [
        PlannedSweep(axes, own[0].settings, own[0].sources)
        for own in alike.values()
        for axes in _products([key_of(one)[0] for one in own])
    ]


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
