"""What `kvbench.evaluate` is asked for, as the combinations that a command line would make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from numbers import Real
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from kvbench.api.trees import tree_of
from kvbench.config.compose import Combination
from kvbench.config.grammar import quoted
from kvbench.config.overrides import check
from kvbench.config.presets import SCHEDULE, policy_config
from kvbench.config.tree import Config, find
from kvbench.errors import UsageError
from kvbench.models.given import given_name
from kvbench.policies.policy import Policy
from kvbench.tasks.task import Task

Model = PreTrainedModel | str | Path
_INSTEAD = {"policy": "policies", "budget": "budgets", "task": "tasks"}
_OF_THE_COMMAND = ("launcher", "logger", "experiment", "debug")
"""Fields of the command line that say how it runs and what it shows."""


@dataclass(frozen=True)
class Asked:
    """Tasks, policies and budgets, and the other fields by their names on the command line.

    kept: the runs stay on disk.
    """

    model: Model
    tasks: Sequence[Task | str]
    policies: Sequence[Policy | str]
    budgets: Sequence[float]
    settings: Mapping[str, Any]
    config_dir: str | Path | None
    kept: bool

    def combinations(self) -> list[Combination]:
        """Every task with every policy at every budget, in this order. Raises UsageError."""
        self._check()
        folders = [] if self.config_dir is None else [Path(self.config_dir).expanduser()]
        flags = ["-m", *(part for folder in folders for part in ("--config-dir", str(folder)))]
        # Presets are checked in the place of objects, whose trees they make room for.
        chosen = [f"task={_names(self.tasks, 'niah')}", f"policy={_names(self.policies, 'full')}"]
        chosen.append(f"budget={','.join(map(str, self.budgets))}")
        others = [f"{name}={typed(value)}" for name, value in self.settings.items()]
        found = check([*flags, *_model(self.model, folders), *chosen, *others]).cells
        self._check_objects(found[0].config)
        places = product(self.tasks, self.policies, self.budgets)
        return [self._with_objects(one, task, policy) for one, (task, policy, _) in zip(found, places, strict=True)]

    def _check(self) -> None:
        for name in self.settings:
            if name.partition(".")[0] in _OF_THE_COMMAND:
                raise UsageError(f"{name}= is for the command line: evaluate runs here and returns its results")
            if name in _INSTEAD:
                raise UsageError(f"{name}= is not allowed, write {_INSTEAD[name]}=")
        wanted: dict[str, tuple[Sequence[object], type]] = {
            "policies": (self.policies, Policy),
            "tasks": (self.tasks, Task),
            "budgets": (self.budgets, Real),
        }
        for name, (items, kind) in wanted.items():
            if not items:
                raise UsageError(f"{name}=[] is not allowed, it must name one at least")
            for item in items:
                if not isinstance(item, kind) and (kind is Real or not isinstance(item, str)):
                    said = "a number" if kind is Real else f"a name or a {kind.__name__}"
                    raise UsageError(f"{name}={item!r} is not allowed, it must be {said}")

    def _check_objects(self, frame: Mapping[str, Any]) -> None:
        """UsageError for fields of a task or a policy beside an object, which has its own. frame: any cell's fields."""
        groups = {name: name.partition(".")[0] for name in self.settings}
        of_tasks = [name for name, group in groups.items() if group == "task" or group not in frame]
        of_policies = [name for name, group in groups.items() if group in ("policy", *SCHEDULE)]
        for items, kind, told in ((self.policies, Policy, of_policies), (self.tasks, Task, of_tasks)):
            if told and any(isinstance(item, kind) for item in items):
                raise UsageError(f"{told[0]}= is for names, a {kind.__name__} object has its own: set it there")

    def _with_objects(self, one: Combination, task: Task | str, policy: Policy | str) -> Combination:
        """The combination with objects in place of the presets that stood for them."""
        choices, config, preset = dict(one.choices), dict(one.config), dict(one.preset)
        if isinstance(task, Task):
            choices["task"], config["task"] = task.name, tree_of(task, "task", self.kept)
            preset["task"] = config["task"]
        if isinstance(policy, Policy):
            tree = tree_of(policy, "policy", self.kept)
            choices["policy"], config["policy"] = policy.name, tree
            config["budget"] = preset["budget"] = tree.pop("budget")
            preset["policy"] = _preset(policy.name) or tree
        if isinstance(self.model, PreTrainedModel):
            choices["model"] = given_name(self.model)
        return replace(one, choices=choices, config=config, preset=preset)


def _preset(name: str) -> Config | None:
    """The tree of a policy's name, from which labels tell what differs; None for a name of one's own."""
    try:
        return policy_config(name)
    except ValueError:
        return None


def _names(items: Sequence[object], instead: str) -> str:
    return ",".join(item if isinstance(item, str) else instead for item in items)


def _model(model: Model, folders: Sequence[Path]) -> list[str]:
    """The arguments that choose a model: a preset, a folder, or what the hub has."""
    if isinstance(model, PreTrainedModel):
        return ["model=local"]
    name = str(model)
    if isinstance(model, str) and find("model", name, folders):
        return [f"model={name}"]
    if Path(name).expanduser().is_dir() or isinstance(model, Path) or name.startswith(("/", "~", ".")):
        return ["model=local", f"model.path={quoted(name)}"]
    return ["model=hub", f"model.hub_id={quoted(name)}"] if "/" in name else [f"model={name}"]


def typed(value: object) -> str:
    """A value as the command line takes it."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{typed(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(typed, value))}]"
    return str(value) if isinstance(value, Real) else quoted(value)
