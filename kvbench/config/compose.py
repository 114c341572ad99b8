"""The configuration of a cell: the fields of every run, the files of the groups chosen, an experiment over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbench.config.choices import GROUPS, chosen, did_you_mean
from kvbench.config.tree import CONF, Config, find, load, merge, names
from kvbench.errors import UsageError
from kvbench.terminal.errors import refusing

PARTS = ("model", "policy", "task")
"""The groups that tell what is computed."""


@dataclass(frozen=True)
class Combination:
    """One cell of a sweep as the command line asks for it."""

    title: str  # the values it has and others have not: "policy=snapkv budget=64"
    choices: Mapping[str, str]  # the names chosen, by group
    config: Config  # resolved
    preset: Config  # the same choices with no field set


@dataclass(frozen=True)
class Experiment:
    """A file of conf/experiment: the choices it makes, its fields, and what its sweep lists where it is one."""

    choices: Mapping[str, str] = field(default_factory=dict)
    fields: Config = field(default_factory=dict)
    lists: Mapping[str, Any] = field(default_factory=dict)
    is_sweep: bool = False


class Composer:
    """Composes configurations, with the folders of --config-dir searched first; each file is read once."""

    def __init__(self, folders: Sequence[Path] = ()) -> None:
        self.folders = tuple(folders)
        frame = load(CONF / "config.yaml")
        lines = [line for line in frame.pop("defaults") if line != "_self_"]
        self._frame, self._defaults = (
            frame,
            {group: str(name) for line in lines for group, name in line.items() if name},
        )
        self._parts: dict[tuple[str, str], Config] = {}
        self._experiments = {"null": Experiment()}

    def part(self, group: str, name: str) -> Config:
        """What stands under `group` where it is chosen as `name`; not to be changed. Raises UsageError."""
        if (group, name) not in self._parts:
            self._parts[group, name] = chosen(group, name, self.folders)
        return self._parts[group, name]

    def compose(self, choices: Mapping[str, str]) -> tuple[Config, dict[str, str]]:
        """A fresh configuration, not yet resolved, and the name chosen in every group. Raises UsageError."""
        experiment = self.experiment(choices.get("experiment", "null"))
        names = {**self._defaults, **experiment.choices, **choices}
        parts = {group: self.part(group, names[group]) for group in GROUPS if group != "experiment"}
        return merge(deepcopy({**self._frame, **parts}), deepcopy(experiment.fields)), names

    def experiment(self, name: str) -> Experiment:
        """What an experiment says; of a table its sweeps are for `config.sweeps`. Raises UsageError."""
        if name not in self._experiments:
            self._experiments[name] = self._experiment(name)
        return self._experiments[name]

    def _experiment(self, name: str) -> Experiment:
        file = find("experiment", name, self.folders)
        if file is None:
            known = names("experiment", self.folders)
            raise UsageError(f"experiment={name} is unknown{did_you_mean(name, known, in_help=True)}")
        with refusing():
            fields = load(file)
        choices: dict[str, str] = {}
        for line in fields.pop("defaults", []):
            (key, value), *more = line.items() if isinstance(line, dict) else [("", line)]
            group = key.removeprefix("override /")
            if line != "_self_" and (group not in GROUPS or more or not isinstance(value, str)):
                raise UsageError(f"{file} cannot be read: its defaults may be such as `override /policy: snapkv`")
            choices |= {group: value} if group else {}
        told = fields.pop("hydra", {})
        fields.pop("sweeps", None)
        strangers = fields.keys() - self._frame.keys() - {*GROUPS}
        if strangers:
            raise UsageError(f"experiment={name} sets {min(strangers)}, which is not a field of a run")
        lists = told.get("sweeper", {}).get("params", {})
        return Experiment(choices, fields, lists, told.get("mode") == "MULTIRUN")


def resolved(config: Config) -> Config:
    """The configuration with every `${...}` replaced. Raises UsageError."""
    if not _refers(config):
        return config
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        values = OmegaConf.to_container(OmegaConf.create(config), resolve=True)
    except OmegaConfBaseException as error:
        said = str(error).strip().splitlines()[0]
        raise UsageError(f"{error.full_key or 'a field'} refers to what cannot be had: {said}") from error
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _refers(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_refers, value.values()))
    if isinstance(value, list):
        return any(map(_refers, value))
    return isinstance(value, str) and "${" in value
