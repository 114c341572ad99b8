"""A command line before anything runs: every argument checked, and a configuration made for every cell it asks for."""

from __future__ import annotations

import itertools
import os
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from kvbench.config.choices import GROUPS, did_you_mean
from kvbench.config.compose import PARTS, Combination, Composer, resolved
from kvbench.config.flags import read_flags
from kvbench.config.grammar import Setting, parse, quoted
from kvbench.config.tree import Config, field_names, merge
from kvbench.errors import UsageError
from kvbench.policies.press import press_class
from kvbench.terminal.errors import refusing


@dataclass(frozen=True)
class Asked:
    """A checked command line. settings: by field, those that an experiment lists first."""

    told: Namespace  # what the flags say
    settings: Mapping[str, Setting]
    is_sweep: bool
    composer: Composer = field(repr=False)

    @cached_property
    def cells(self) -> list[Combination]:
        """Every combination of the values listed, the last one's values fastest. Raises UsageError."""
        return list(self._combinations())

    @property
    def first(self) -> Combination:
        """The first of the cells."""
        return next(self._combinations())

    def _combinations(self) -> Iterator[Combination]:
        swept = [key for key, s in self.settings.items() if len(s.values) > 1] or [*filter(_tells_what, self.settings)]
        for values in itertools.product(*(setting.values for setting in self.settings.values())):
            yield self._cell(dict(zip(self.settings, values, strict=True)), swept)

    def _cell(self, values: Mapping[str, tuple[str, Any]], swept: Sequence[str]) -> Combination:
        choices = {key: name for key, (_, name) in values.items() if key in GROUPS}
        config, chosen = self.composer.compose(choices)
        preset, _ = self.composer.compose({group: chosen[group] for group in PARTS})
        for key, (_, value) in values.items():
            if key not in GROUPS:
                lay(config, key, value)
        words = [values[key][0] for key in swept] or [f"policy={chosen['policy']}"]
        return Combination(" ".join(words), chosen, resolved(config), resolved(preset))


def check(arguments: Sequence[str]) -> Asked:
    """Check a command line without running anything. Raises UsageError.

    A folder as `model=` becomes `model.path=`, `num_fewshot=8` becomes `task.num_fewshot=8`, and `press=` a class.
    """
    told = read_flags(arguments)
    composer = Composer((Path(told.config_dir).resolve(),) if told.config_dir else ())
    given = [parse(part, composer.folders) for argument in told.overrides for part in _spelt_out(argument)]
    given = [s for s in given if s.key != "experiment" or s.values[0][1] != "null"]  # none, as it is anyway
    experiments = next((s.values for s in reversed(given) if s.key == "experiment"), (("", "null"),))
    experiment = composer.experiment(experiments[0][1])
    is_sweep = bool(told.multirun or experiment.is_sweep)
    listed = [s.line for s in given if s.lists]
    if listed and not is_sweep:
        raise UsageError(f"{listed[0]} names several values: add -m to run them all")
    lists = experiment.lists if is_sweep else {}
    settings = {s.key: s for s in [*(parse(f"{k}={v}", composer.folders) for k, v in lists.items()), *given]}
    alternatives = _Alternatives(composer, settings)
    made = tuple(key.removesuffix("_target_") for key in settings if key.endswith("._target_"))
    with refusing():
        fitted = [s if s.key.startswith(made) else _fit(s, alternatives) for s in settings.values()]
    return Asked(told, {setting.key: setting for setting in fitted}, is_sweep, composer)


def _tells_what(key: str) -> bool:
    """Whether a field tells what a cell is, not where it is computed, told and kept."""
    return key.partition(".")[0] not in ("launcher", "logger", "out", "debug")


class _Alternatives:
    """The configurations that the choices of a command line make, as far as the check of a field needs them."""

    def __init__(self, composer: Composer, settings: Mapping[str, Setting]) -> None:
        self._composer = composer
        self._names = {s.key: [str(name) for _, name in s.values] for s in settings.values() if s.is_group}
        for group, listed in self._names.items():
            for name in listed:
                _ = composer.experiment(name) if group == "experiment" else composer.part(group, name)

    def of(self, group: str) -> list[Config]:
        """One configuration for each choice of a group that is swept, else the only one."""
        first = {key: listed[0] for key, listed in self._names.items()}
        each = [{**first, group: name} for name in self._names.get(group, ())] or [first]
        return [self._composer.compose(choices)[0] for choices in each]


def _fit(setting: Setting, alternatives: _Alternatives) -> Setting:
    """The argument, about a field that one of the configurations has, or can have. Raises UsageError."""
    if setting.is_group:
        return setting
    key = setting.key
    configs = alternatives.of(key.partition(".")[0])
    if "." not in key and key not in configs[0]:  # a field of the task alone needs no `task.`
        of_tasks = alternatives.of("task")
        if any(_can_have(config, f"task.{key}") for config in of_tasks):
            return replace(setting, key=f"task.{key}")
    if not any(_can_have(config, key) for config in configs):
        raise _no_field(configs[0], key)
    return setting


def _no_field(config: Config, key: str) -> UsageError:
    """The error for a field that is not there: of what it is none, and the names that exist there."""
    near = key
    while "." in near and not isinstance(_parent(config, near), Mapping):
        near = near.rpartition(".")[0]
    parent, above = _parent(config, near), near.rpartition(".")[0]
    more = field_names(parent) if above else GROUPS
    names = sorted({*(str(name) for name in parent if not str(name).startswith("_")), *more})
    of = f" of {above}" if above else ""
    return UsageError(f"{key} is not a field{of}{did_you_mean(key.rpartition('.')[2], names)}")


def _parent(config: Config, key: str) -> Any:  # noqa: ANN401 - whatever a configuration holds
    """What the last step of a dotted key would be a field of; None where there is no such place."""
    node: Any = config
    for step in key.split(".")[:-1]:
        node = node.get(step) if isinstance(node, Mapping) else None
    return node


def _can_have(config: Config, key: str) -> bool:
    """Whether a field is there, or left to its default by the part it would belong to."""
    parent, name = _parent(config, key), key.rpartition(".")[2]
    return isinstance(parent, Mapping) and (name in parent or name in field_names(parent))


def lay(config: Config, key: str, value: Any) -> None:  # noqa: ANN401 - whatever the grammar knows
    """Set one field of a configuration. Raises UsageError."""
    *above, name = key.split(".")
    node = config
    for step in above:
        inner = node.setdefault(step, {}) or {}
        if not isinstance(inner, dict):
            raise UsageError(f"{key} is not a field: {step} has none")
        node[step] = inner
        node = inner
    if isinstance(value, dict) and isinstance(node.get(name), dict):
        merge(node[name], value)
    else:
        node[name] = value


def _spelt_out(argument: str) -> list[str]:
    """What stands for longer words: a folder as `model=`, and `press=`, whose fields are `press.compression_ratio=`.

    `model=/some/folder` says the same as `model=local model.path=/some/folder`; several may be swept.
    """
    key, _, value = argument.partition("=")
    if key == "press" or key.startswith("press."):
        inner = key.rpartition(".")[2] in ("press", "base_press")  # of a press around another
        return [f"policy.{key}._target_={','.join(_classes(value))}" if inner else f"policy.{argument}"]
    if key != "model" or not ("/" in value or value.startswith("~")):
        return [argument]
    folders = [value] if os.path.exists(os.path.expanduser(value)) else value.split(",")
    return ["model=local", f"model.path={','.join(quoted(folder) for folder in folders)}"]


def _classes(value: str) -> list[str]:
    """Presses as classes of kvpress. Raises UsageError where it is not installed, or has no such press."""
    with refusing():
        return [press_class(name) for name in value.split(",")]
