"""The run that measures each published number, by the rules of results/paper/<paper>/protocol.yaml (the last wins)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from kvbench.papers import published
from kvbench.papers.layout import longbench, names, read_yaml
from kvbench.papers.published import AVERAGE, BASELINE, Number

SCHEDULE = ("schedule", "block", "decode", "every", "protect")  # fields of policies that evict
NO_BUDGET = "none"


@dataclass(frozen=True)
class ProtocolRule:
    """A rule for the numbers whose fields match the patterns (`cake*`) of `when`.

    model, policy, task: as in `kvbench`. budget: the budget of the run, or `none`, if it differs from the
    printed one. set: further fields of a run. measure: the metric of a run that corresponds to the number: `score`,
    `perplexity`, `perplexity_gap`, `average` or `official NAME`, which `only` restricts to some examples. times: factor
    from kvbench's unit to that of the paper. note: a caveat of the comparison. cannot: why no run can measure the
    number. source: the section of the paper, or the code, that justifies the rule.
    """

    source: str = ""
    when: Mapping[str, Sequence[str]] = field(default_factory=dict)
    model: str | None = None
    policy: str | None = None
    task: str | None = None
    budget: int | float | str | None = None
    set: Mapping[str, Any] = field(default_factory=dict)
    measure: str | None = None
    only: Mapping[str, str] = field(default_factory=dict)
    times: float | None = None
    note: str = ""
    cannot: str = ""

    def holds(self, number: Number) -> bool:
        """Whether the rule applies to a number."""
        return all(
            any(fnmatchcase(str("" if (value := getattr(number, name)) is None else value), one) for one in patterns)
            for name, patterns in self.when.items()
        )


@dataclass(frozen=True)
class Plan:
    """The run that measures a published number; settings: its further fields. See `ProtocolRule` for the rest."""

    model: str
    policy: str
    budget: int | float | None
    task: str
    settings: Mapping[str, Any]
    measure: str = "score"
    only: Mapping[str, str] = field(default_factory=dict)
    times: float = 100.0
    notes: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[object, ...]:
        """Identifies the run within a table."""
        return self.model, self.policy, self.budget, self.task, *map(str, self.settings.items())


@dataclass(frozen=True)
class Cannot:
    """Why no run can measure a published number."""

    reason: str
    source: str


@cache
def rules(paper: str) -> tuple[ProtocolRule, ...]:
    """The rules of a paper."""
    return tuple(_rule(raw) for raw in read_yaml(f"{paper}/protocol.yaml")["rules"])


def _rule(raw: Mapping[str, Any]) -> ProtocolRule:
    when = {key: value if isinstance(value, list) else [value] for key, value in raw.get("when", {}).items()}
    return ProtocolRule(**{**raw, "when": {key: [*map(str, values)] for key, values in when.items()}})


@cache
def plan(number: Number) -> Plan | Cannot:
    """The run that measures a number, or why there is none."""
    found = [rule for rule in rules(number.paper) if rule.holds(number)]
    for rule in found:
        if rule.cannot:
            return Cannot(rule.cannot, rule.source)
    model = _last(found, "model") or names()["models"].get(number.model)
    task = _last(found, "task") or _own_task(number)
    budget = _budget(found, number)
    if not model:
        return Cannot(
            f"the paper does not name the model of {number.table}" if not number.model else "no configuration", ""
        )
    if task is None:
        return Cannot(f"kvbench has no task {number.task!r}", "")
    if budget is None and not number.budget_kind and number.method != BASELINE:
        return Cannot("the paper does not name the budget", "")
    measure = _last(found, "measure") or ("average" if number.task.endswith(AVERAGE) else "score")
    if measure == "average":
        for part in parts(number):
            if isinstance(refused := plan(part), Cannot):
                return Cannot(f"its part {part.task} cannot be run: {refused.reason}", refused.source)
    settings = {k: v for rule in found for k, v in rule.set.items() if budget is not None or k not in SCHEDULE}
    return Plan(
        model=model,
        policy=_last(found, "policy") or number.method,
        budget=budget,
        task=task,
        settings={key: value for key, value in settings.items() if value is not None},
        measure=measure,
        only={k: v for rule in found for k, v in rule.only.items()},
        times=_last(found, "times") or 100.0,
        notes=tuple(dict.fromkeys(rule.note for rule in found if rule.note)),
    )


def _last(found: Sequence[ProtocolRule], name: str) -> Any:  # noqa: ANN401
    """The value of a field in the last rule that sets it."""
    given = [value for rule in found if (value := getattr(rule, name)) is not None]
    return given[-1] if given else None


def _budget(found: Sequence[ProtocolRule], number: Number) -> int | float | None:
    """The budget of the run; bit widths are part of a store's name instead."""
    given = _last(found, "budget")
    if given is not None:
        return None if given == NO_BUDGET else given
    return None if number.budget_kind == "bits" else number.budget


def _own_task(number: Number) -> str | None:
    if number.task in longbench():
        return f"longbench/{number.task}"
    return "longbench" if number.task.endswith(AVERAGE) else None


def parts(number: Number) -> tuple[Number, ...]:
    """The numbers of a printed average: the other tasks of the table, or the 16 of LongBench if there are none."""
    prefix = number.task.removesuffix(AVERAGE)
    others = [
        n for n in published.read_table(number.name) if n.task.startswith(prefix) and not n.task.endswith(AVERAGE)
    ]
    kinds = dict.fromkeys((n.task, n.metric) for n in others)
    tasks = kinds or dict.fromkeys((task, number.metric) for task in longbench())
    return tuple(replace(number, task=task, metric=metric) for task, metric in tasks)


def runs_of(number: Number) -> Iterator[Plan]:
    """The runs that a number needs: one, or those of the parts of an average, or none if it cannot be measured."""
    own = plan(number)
    if isinstance(own, Plan):
        if own.measure != "average":
            yield own
        else:
            for part in parts(number):
                one = plan(part)
                assert isinstance(one, Plan), "plan() refuses averages with such parts"
                yield one


def refused(numbers: Iterable[Number]) -> dict[str, list[Number]]:
    """The numbers that cannot be measured, by reason."""
    reasons: dict[str, list[Number]] = {}
    for number in numbers:
        if isinstance(own := plan(number), Cannot):
            reasons.setdefault(own.reason, []).append(number)
    return reasons
