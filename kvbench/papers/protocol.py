"""How each published number would be measured with kvbench: `results/paper/<paper>/protocol.yaml`.

A protocol is a list of rules, each with the section of the paper (or the code) it is from; of two that set the same
thing the later wins. What no run of ours can be about has a rule that says why (`cannot`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from kvbench.papers import arrangement, published
from kvbench.papers.published import AVERAGE, BASELINE, Number

SCHEDULE = ("schedule", "block", "decode")  # said only of policies that evict
NO_BUDGET = "none"


@dataclass(frozen=True)
class Rule:
    """What holds for the numbers that `when` describes: fields and the values (patterns such as `cake*`) they may have.

    model, policy, task: choices of `python -m kvbench`. budget: as there, or `none`, where the paper counts otherwise.
    set: further fields of a run. measure: what of a run is the number: `score`, `perplexity`, `perplexity_gap`,
    `average` or `official NAME`, which `only` narrows to some examples. times: our unit into the paper's. note: what a
    reader must know of the comparison. cannot: why no run can be about it. source: where the rule is from.
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
        """Whether the rule is about a number."""
        return all(
            any(fnmatchcase(str("" if (value := getattr(number, name)) is None else value), one) for one in patterns)
            for name, patterns in self.when.items()
        )


@dataclass(frozen=True)
class Plan:
    """The run that measures a published number; sources: field -> where the paper says so. See `Rule` for the rest."""

    model: str
    policy: str
    budget: int | float | None
    task: str
    settings: Mapping[str, Any]
    measure: str
    only: Mapping[str, str]
    times: float
    notes: tuple[str, ...]
    sources: Mapping[str, str]


@dataclass(frozen=True)
class Cannot:
    """Why no run can be about a published number."""

    reason: str
    source: str


@cache
def rules(paper: str) -> tuple[Rule, ...]:
    """The rules of a paper."""
    return tuple(_rule(raw) for raw in arrangement.read_yaml(f"{paper}/protocol.yaml")["rules"])


def _rule(raw: Mapping[str, Any]) -> Rule:
    when = {key: value if isinstance(value, list) else [value] for key, value in raw.get("when", {}).items()}
    return Rule(**{**raw, "when": {key: [*map(str, values)] for key, values in when.items()}})


@cache
def plan(number: Number) -> Plan | Cannot:
    """How a published number is measured, or why it cannot be."""
    found = [rule for rule in rules(number.paper) if rule.holds(number)]
    for rule in found:
        if rule.cannot:
            return Cannot(rule.cannot, rule.source)
    model = _last(found, "model") or arrangement.names().models.get(number.model)
    task = _last(found, "task") or _own_task(number)
    budget = _budget(found, number)
    if not model:
        return Cannot(
            f"the paper does not say of which model {number.table} is" if not number.model else "no configuration", ""
        )
    if task is None:
        return Cannot(f"kvbench has no task {number.task!r}", "")
    if budget is None and not number.budget_kind and number.method != BASELINE:
        return Cannot("the paper does not say the budget", "")
    measure = _last(found, "measure") or ("average" if number.task.endswith(AVERAGE) else "score")
    if measure == "average":
        for part in parts(number):
            if isinstance(refused := plan(part), Cannot):
                return Cannot(f"its part {part.task} cannot be run: {refused.reason}", refused.source)
    settings = {
        k: (v, rule.source) for rule in found for k, v in rule.set.items() if budget is not None or k not in SCHEDULE
    }
    return Plan(
        model=model,
        policy=_last(found, "policy") or number.method,
        budget=budget,
        task=task,
        settings={key: value for key, (value, _) in settings.items() if value is not None},
        measure=measure,
        only={k: v for rule in found for k, v in rule.only.items()},
        times=_last(found, "times") or 100.0,
        notes=tuple(dict.fromkeys(rule.note for rule in found if rule.note)),
        sources={key: source for key, (value, source) in settings.items() if value is not None},
    )


def _last(found: Sequence[Rule], name: str) -> Any:  # noqa: ANN401
    """The value of the last rule that says anything of a field."""
    said = [value for rule in found if (value := getattr(rule, name)) is not None]
    return said[-1] if said else None


def _budget(found: Sequence[Rule], number: Number) -> int | float | None:
    """What `budget=` says; a store's code width is in its method's name."""
    said = _last(found, "budget")
    if said is not None:
        return None if said == NO_BUDGET else said
    return None if number.budget_kind == "bits" else number.budget


def _own_task(number: Number) -> str | None:
    if number.task in arrangement.names().categories:
        return f"longbench/{number.task}"
    return "longbench" if number.task.endswith(AVERAGE) else None


def parts(number: Number) -> tuple[Number, ...]:
    """What a printed average is the mean of: the table's other tasks, or LongBench's 16 where it prints no other."""
    prefix = number.task.removesuffix(AVERAGE)
    others = [
        n for n in published.read_table(number.name) if n.task.startswith(prefix) and not n.task.endswith(AVERAGE)
    ]
    kinds = dict.fromkeys((n.task, n.metric) for n in others)
    tasks = kinds or dict.fromkeys((task, number.metric) for task in arrangement.names().categories)
    return tuple(replace(number, task=task, metric=metric) for task, metric in tasks)


def runs_of(number: Number) -> Iterator[Plan]:
    """The plans of the runs a number needs: its own, or those of the parts of an average. None if it cannot be run."""
    own = plan(number)
    if isinstance(own, Plan):
        if own.measure != "average":
            yield own
        else:
            for part in parts(number):
                one = plan(part)
                assert isinstance(one, Plan), "an average with a part that cannot be run is refused"
                yield one


def refused(numbers: Iterable[Number]) -> dict[str, list[Number]]:
    """Why some of the numbers cannot be run, and which."""
    reasons: dict[str, list[Number]] = {}
    for number in numbers:
        if isinstance(own := plan(number), Cannot):
            reasons.setdefault(own.reason, []).append(number)
    return reasons
