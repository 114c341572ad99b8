"""Plans as cells of a sweep, and as command lines that can be handed to whatever runs them elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cache
from typing import Any

import yaml

from kvbench.config.compose import Combination
from kvbench.config.overrides import check
from kvbench.papers.protocol import Plan, command

GROUPS = ("model", "policy", "task")
_PROGRAM = len(("python", "-m", "kvbench"))


def overrides(plan: Plan, run: Mapping[str, str]) -> list[str]:
    """What `python -m kvbench` is told to compute a planned run: `model=...`, `policy=...`, ...

    run: fields that hold for all runs, such as `limit`.
    """
    return [*command([plan])[_PROGRAM:], *(f"{key}={value}" for key, value in run.items())]


def combinations(plans: Sequence[Plan], run: Mapping[str, str]) -> list[Combination]:
    """Planned runs as a sweep has them, each called by the words of its `overrides` that not all of them share."""
    lines = [overrides(plan, run) for plan in plans]
    shared = set.intersection(*map(set, lines)) if len(lines) > 1 else set()
    titles = [" ".join(word for word in line if word not in shared) for line in lines]
    return [_combination(plan, run, title) for plan, title in zip(plans, titles, strict=True)]


def _combination(plan: Plan, run: Mapping[str, str], title: str) -> Combination:
    """The same as what the plan's `overrides` make, without composing each of them anew."""
    choices = dict(zip(GROUPS, (plan.model, plan.policy, plan.task), strict=True))
    preset = _config(*choices.values())
    config = deepcopy(preset)
    if plan.budget is not None:
        config["budget"] = plan.budget
    for key, value in (*plan.settings.items(), *((key, yaml.safe_load(value)) for key, value in run.items())):
        _set(config, key, value)
    return Combination(title, choices, config, preset)


def _config(*choices: str) -> dict[str, Any]:
    """The configuration of a model, a policy and a task with no field set."""
    chosen = {group: deepcopy(_node(group, choice)) for group, choice in zip(GROUPS, choices, strict=True)}
    return {**_root(), **chosen}


@cache
def _node(group: str, choice: str) -> Any:  # noqa: ANN401 - whatever YAML holds
    return check([f"{group}={choice}"]).first.config[group]


@cache
def _root() -> dict[str, Any]:
    return {key: value for key, value in check([]).first.config.items() if key not in GROUPS}


def _set(config: dict[str, Any], key: str, value: Any) -> None:  # noqa: ANN401
    """Set `policy.allocator.tau1`, say; whether the part has the field is checked when it is built."""
    *above, name = key.split(".")
    for part in above:
        config = config[part]
    config[name] = value
