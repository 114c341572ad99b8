"""Plans as cells that can be run, and as command lines that can be handed to whatever runs them elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from typing import Any

import yaml
from omegaconf import OmegaConf

from kvbench.config.overrides import check
from kvbench.papers.protocol import Plan, command
from kvbench.runs.cell import Cell, build_cell

GROUPS = ("model", "policy", "task")
_PROGRAM = len(("python", "-m", "kvbench"))


def overrides(plan: Plan, run: Mapping[str, str]) -> list[str]:
    """What `python -m kvbench` is told to compute a planned run: `model=...`, `policy=...`, ...

    run: fields that hold for all runs, such as `limit`.
    """
    return [*command([plan])[_PROGRAM:], *(f"{key}={value}" for key, value in run.items())]


def build(plan: Plan, run: Mapping[str, str]) -> Cell:
    """The cell of a planned run: the same as that of its `overrides`, without composing each of them anew.

    Raises UsageError where the run cannot be made, such as where the model is not on this machine.
    """
    preset = _config(plan.model, plan.policy, plan.task)
    config = deepcopy(preset)
    if plan.budget is not None:
        config["budget"] = plan.budget
    for key, value in (*plan.settings.items(), *((key, yaml.safe_load(value)) for key, value in run.items())):
        _set(config, key, value)
    return build_cell(config, plan.policy, plan.model, preset)


def _config(*choices: str) -> dict[str, Any]:
    """The configuration of a model, a policy and a task with no field set."""
    chosen = {group: deepcopy(_node(group, choice)) for group, choice in zip(GROUPS, choices, strict=True)}
    return {**_root(), **chosen}


@cache
def _node(group: str, choice: str) -> Any:  # noqa: ANN401 - whatever YAML holds
    config = check([f"{group}={choice}"]).config
    return OmegaConf.to_container(OmegaConf.masked_copy(config, [group]), resolve=True)[group]  # type: ignore[index,call-overload]


@cache
def _root() -> dict[str, Any]:
    config = check([]).config
    ours = OmegaConf.masked_copy(config, [str(key) for key in config if key not in ("hydra", *GROUPS)])
    values = OmegaConf.to_container(ours, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _set(config: dict[str, Any], key: str, value: Any) -> None:  # noqa: ANN401
    """Set `policy.allocator.tau1`, say; whether the part has the field is checked when it is built."""
    *above, name = key.split(".")
    for part in above:
        config = config[part]
    config[name] = value
