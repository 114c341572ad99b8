"""Compares runs with the numbers of a published table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from statistics import fmean
from typing import Any

import pandas as pd
import yaml

from kvbench.config.compose import check_run_fields
from kvbench.config.presets import make_policy
from kvbench.errors import UsageError, counted
from kvbench.models.cache_shapes import cache_shape
from kvbench.papers.layout import HOLE, TableLayout, budget_text, layout, numbers
from kvbench.papers.matching import Measured, Runs, average, measured, run_task
from kvbench.papers.protocol import SCHEDULE, Cannot, Plan, plan, runs_of
from kvbench.papers.published import AVERAGE, Number
from kvbench.report.text_table import TextTable
from kvbench.results.result import Result
from kvbench.results.statistics import between
from kvbench.terminal.command import pairs
from kvbench.tools.cache_bytes import MIB, predict

SWEPT = ("model", "policy", "budget", "task")
ELSEWHERE = (
    "limit",
    "out",
    "device",
    "dtype",
    "seed",
    "allow_version_mismatch",
    "logger",
    "engine",
    "hydra",
)
"""Fields of a run that do not affect which number it measures."""
OURS = ("ours", "95% interval", "difference", "n", "tokens", "MiB")
PROMPT = 8192  # tokens, for predicted bytes


@dataclass(frozen=True)
class Line:
    """A published number with its planned runs, its measured value, and remarks."""

    number: Number
    plans: tuple[Plan, ...] = ()
    value: Measured | None = None
    remarks: tuple[str, ...] = ()

    @property
    def place(self) -> tuple[str, ...]:
        """Numbers with the same place are in one block, under one method."""
        return self.number.table, self.number.model, budget_text(self.number), self.number.method


class Choice:
    """The overrides of a table's runs, as in `kvbench`.

    A value of model, policy, budget or task that the table has selects its numbers. Other values replace those of the
    table: one value for all, or as many as the table has, in its order. Several new tasks are averaged.
    """

    def __init__(self, name: str, overrides: Sequence[str] = ()) -> None:
        given = pairs(overrides, "model=pocket")
        check_run_fields(given)
        plans = [one for number in numbers(name) for one in runs_of(number)]
        self.settings = {
            key: yaml.safe_load(value)
            for key, value in given.items()
            if key not in SWEPT and key.partition(".")[0].partition("/")[0] not in ELSEWHERE
        }
        self.selected: dict[str, list[Any]] = {}
        self.replaced: dict[str, list[Any]] = {}
        self.known = {key: list(dict.fromkeys(getattr(one, key) for one in plans)) for key in SWEPT}
        self.known["budget"] = [budget for budget in self.known["budget"] if budget is not None]
        for key in (key for key in SWEPT if key in given):
            self._read(name, key, given[key])

    def _read(self, name: str, key: str, value: str) -> None:
        known = self.known[key]
        values = [yaml.safe_load(word) if key == "budget" else word for word in value.split(",")]
        if key == "task" and all(str(task).startswith(f"{value}/") for task in known):
            return  # the suite of all tasks of the table
        if {*values} <= {*known}:
            self.selected[key] = values
        elif key == "policy" or {*values} & {*known}:
            unknown = ", ".join(str(one) for one in values if one not in known)
            raise UsageError(f"{key}={value}: {unknown} is not in {name}, which has {', '.join(map(str, known))}")
        elif key != "task" and len(values) not in (1, len(known)):
            raise UsageError(f"{key}={value}: give one value, or {len(known)} in place of {', '.join(map(str, known))}")
        else:
            self.replaced[key] = values

    def plans(self, number: Number) -> list[Plan]:
        """The runs that measure a number; empty if it is not selected or cannot be measured."""
        own = list(runs_of(number))
        kept = [one for one in own if all(self._has(one, key) for key in self.selected)]
        found = [new for one in own for new in self._replaced(one)] if len(kept) == len(own) else []
        return list({one.key: one for one in found}.values())

    def _has(self, one: Plan, key: str) -> bool:
        value = getattr(one, key)
        return value in self.selected[key] or (key == "budget" and value is None)

    def _replaced(self, one: Plan) -> Iterator[Plan]:
        fields: dict[str, Any] = {}
        for key in ("model", "budget"):
            own, new = getattr(one, key), self.replaced.get(key)
            if new and own is not None:
                fields[key] = new[0] if len(new) == 1 else new[self.known[key].index(own)]
        dropped = tuple(f"{key}." for key in ("model", "task") if key in self.replaced)
        settings = {k: v for k, v in one.settings.items() if not dropped or not k.startswith(dropped)}
        added = {k: v for k, v in self.settings.items() if one.budget is not None or k not in SCHEDULE}
        if "task" in self.replaced and not one.measure.startswith("perplexity"):
            fields |= {"measure": "score", "only": {}, "times": 100.0}
        for task in self.replaced.get("task", [one.task]):
            yield replace(one, **fields, task=task, settings={**settings, **added})


def compare(name: str, runs: Sequence[Result], overrides: Sequence[str] = ()) -> TextTable:
    """The published table `name` with measured values, one row per number; unmeasured numbers of a method share a row.

    overrides: see `Choice`. If the tasks are replaced, a row is the mean over the tasks of a method and budget.
    Raises UsageError for an unknown table or value.
    """
    choice, own, known = Choice(name, overrides), layout(name), Runs(runs)
    lines = [_line(number, choice, known) for number in numbers(name)]
    if choice.selected:
        lines = [line for line in lines if line.plans]
    if not lines:
        raise UsageError(f"{' '.join(overrides)} selects no number of {name}")
    order: dict[object, int] = {}
    for line in lines:
        for key in (line.place[:3], line.number.method):
            order.setdefault(key, len(order))
    lines.sort(key=lambda line: (order[line.place[:3]], order[line.number.method]))
    several = len({line.number.metric for line in lines}) > 1
    rows: list[dict[str, str]] = []
    for _, group in groupby(lines, key=lambda line: line.place):
        rows += _rows(own, list(group), several, choice)
    frame = pd.DataFrame(rows).astype(str)
    measured_lines = [line for line in lines if line.value]
    missing = [line for line in lines if line.plans and not line.value]
    counts = len(measured_lines), len(lines), len(missing), len(lines) - len(measured_lines) - len(missing)
    notes = [
        "{} of {} numbers measured, {} without runs, {} that cannot be measured.".format(*counts),
        f"n: examples. tokens, MiB: held at the end, per KV head and in total. predicted: MiB after {PROMPT:,} tokens.",
    ]
    if missing:
        notes.append(" ".join(["kvbench tables run", name, *overrides]))
    if runs and not measured_lines:
        notes.append(f"No run of {len(runs)} measures a number of this table: {_about(runs)}.")
    if choice.replaced:
        instead = "; ".join(f"{key}={','.join(map(str, of))}" for key, of in choice.replaced.items())
        notes.append(f"Ours is measured with {instead}: the values cannot be compared with the published ones.")
    remarks: dict[str, int] = {}
    for remark in (remark for line in lines for remark in line.remarks):
        remarks[remark] = remarks.get(remark, 0) + 1
    notes += [f"{count} number{'s' if count > 1 else ''}: {remark}." for remark, count in remarks.items()]
    blocks = [column for column in ("part", "model", "budget") if column in frame]
    title = f"{name}: {own.title}, our numbers and the published ones"
    return TextTable(frame, title, notes, left=[*blocks, "method", "task"], groups=blocks)


def _line(number: Number, choice: Choice, runs: Runs) -> Line:
    own = plan(number)
    if isinstance(own, Cannot):
        return Line(number, remarks=(f"cannot be measured, {own.reason}",))
    plans = choice.plans(number)
    found = [runs.find(one) for one in plans]
    notes = tuple(dict.fromkeys(note for one in (own, *plans) for note in one.notes))
    made = [run for run, _ in found if run is not None]
    if not plans or len(made) < len(plans):
        return Line(number, tuple(plans), remarks=(*notes, *dict.fromkeys(r for _, r in found if r)))
    value = measured(plans[0], made[0]) if len(plans) == 1 else average(plans, made)
    if isinstance(value, str):
        return Line(number, tuple(plans), remarks=(*notes, value))
    return Line(number, tuple(plans), value, notes)


def _rows(own: TableLayout, lines: Sequence[Line], several: bool, choice: Choice) -> Iterator[dict[str, str]]:
    if "task" in choice.replaced:
        for _, group in groupby(lines, key=lambda line: line.number.metric):
            members = list(group)
            average = next((line for line in members if line.number.task.endswith(AVERAGE)), None)
            printed = average.number.printed if average else f"{fmean(one.number.value for one in members):.2f}"
            yield _row(own, members[0], f"mean of {len(members) - (average is not None)}", printed, choice)
    elif len(lines) > 1 and not any(line.value for line in lines):
        yield _row(own, lines[0], counted(len(lines), "number"), "", choice, lines)
    else:
        for line in lines:
            fields = ("task", "metric") if several else ("task",)
            words = ", ".join(filter(None, (own.label(name, getattr(line.number, name)) for name in fields)))
            yield _row(own, line, words, line.number.printed, choice)


def _row(
    own: TableLayout, line: Line, task: str, printed: str, choice: Choice, lines: Sequence[Line] = ()
) -> dict[str, str]:
    number = line.number
    first = {"part": number.table} if own.parts else {}
    predicted = {_predicted(one) for one in lines or [line]}
    return {
        **first,
        "model": number.model,
        "budget": budget_text(number),
        "method": own.label("method", number.method),
        "task": task,
        "published": printed,
        **_ours(line, bool(choice.replaced)),
        "predicted": predicted.pop() if len(predicted) == 1 else HOLE,
    }


def _ours(line: Line, replaced: bool) -> dict[str, str]:
    found, number = line.value, line.number
    if found is None:
        return dict.fromkeys(OURS, HOLE)
    digits = max(2, len(number.printed.partition(".")[2]))
    interval = HOLE if found.low is None or found.high is None else between(found.low, found.high, f".{digits}f")
    difference = HOLE if replaced else f"{found.value - number.value:+.{digits}f}"
    held = f"{found.kept:.1f}", f"{found.nbytes / MIB:.3f}"
    return dict(zip(OURS, (f"{found.value:.{digits}f}", interval, difference, str(found.n), *held), strict=True))


def _predicted(line: Line) -> str:
    found = {_nbytes(one.model, one.policy, one.budget, tuple(_policy_fields(one))) for one in line.plans}
    nbytes = found.pop() if len(found) == 1 else None
    return HOLE if nbytes is None else f"{nbytes / MIB:.1f}"


def _policy_fields(one: Plan) -> Iterator[tuple[str, Any]]:
    for key, value in one.settings.items():
        if key in ("schedule", "block", "decode") or key.startswith("policy."):
            yield key.removeprefix("policy."), value


@cache
def _nbytes(model: str, policy: str, budget: int | float | None, fields: tuple[tuple[str, Any], ...]) -> int | None:
    """Bytes held after `PROMPT` tokens; None if they depend on the prompt or the model's shape is unknown."""
    try:
        return predict(make_policy(policy, budget, **dict(fields)), cache_shape(model), PROMPT).nbytes
    except ValueError:
        return None


def _about(runs: Sequence[Result]) -> str:
    values: Mapping[str, list[object]] = {
        "model": [run.naming.model for run in runs],
        "budget": [run.budget for run in runs if run.budget is not None],
        "task": [run_task(run) for run in runs],
    }
    words = [f"{key} {', '.join(dict.fromkeys(map(str, of)))}" for key, of in values.items()]
    return f"they have {'; '.join(words)}. Give the overrides of these runs"
