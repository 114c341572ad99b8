"""The command line before anything runs: every override checked, so that a wrong one is answered in one sentence."""

from __future__ import annotations

import logging
import os
import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override, OverrideType
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from kvbench.config.choices import GROUPS, did_you_mean
from kvbench.config.compose import (
    PARTS,
    Choices,
    Combination,
    Composer,
    assignments,
    combinations,
    is_hydras,
    parse,
    plain,
    quoted,
)
from kvbench.config.flags import read_flags
from kvbench.config.tree import field_names
from kvbench.terminal.errors import UsageError, refusing

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Asked:
    """A checked command line: its overrides as Hydra needs them, and the configuration of its first cell."""

    flags: list[str]
    overrides: list[str]
    config: DictConfig  # with the node `hydra`
    told: Namespace  # what the flags say
    composer: Composer = field(repr=False)

    @property
    def arguments(self) -> list[str]:
        """Flags first."""
        return [*self.flags, *self.overrides]

    @property
    def is_sweep(self) -> bool:
        """Whether several cells are asked for, by -m or by an experiment."""
        return bool(self.told.multirun or self.config.hydra.mode == RunMode.MULTIRUN)

    @cached_property
    def cells(self) -> list[Combination]:
        """All that is asked for: each combination of the values listed, by an experiment first. Raises UsageError."""
        params = (OmegaConf.select(self.config, "hydra.sweeper.params") or {}) if self.is_sweep else {}
        listed = [*(f"{key}={value}" for key, value in params.items()), *self.overrides]
        return combinations(self.composer, [parse(line) for line in listed])


def check(arguments: Sequence[str]) -> Asked:
    """Check a command line without running anything.

    Rewritten for Hydra: flags come first, a folder as `model=` becomes `model.path=`, `num_fewshot=8` becomes
    `task.num_fewshot=8`, a policy or task without a file is registered, and a field that a part has but its YAML leaves
    to the default is made settable. Raises UsageError.
    """
    told = read_flags(arguments)
    flags = [argument for argument in arguments if argument not in told.overrides]
    given = [parse(part) for argument in told.overrides for part in _local_model(argument)]
    given = [o for o in given if o.key_or_group != "experiment" or o.value() is not None]  # null: none, as it is anyway
    _tell_twice(given)
    for override in given:
        _refuse_hydras(override)
        _refuse_places(override)
    composer = Composer((Path(told.config_dir).resolve(),) if told.config_dir else ())
    groups = [o for o in given if is_hydras(o)]
    params = OmegaConf.select(composer.compose(groups), "hydra.sweeper.params") or {}
    chosen = [*(parse(f"{key}={value}") for key, value in params.items()), *groups]
    with refusing():
        alternatives = _Alternatives(composer, chosen)
        fitted = [_fit(o, alternatives) for o in given]
    _refuse_strangers(composer, chosen)
    asked = Asked(flags, fitted, composer.compose([*chosen, *map(parse, fitted)]), told, composer)
    listed = [o.input_line for o in given if o.is_sweep_override()]
    if listed and not asked.is_sweep:
        raise UsageError(f"{listed[0]} names several values: add -m to run them all")
    return asked


def _refuse_strangers(composer: Composer, chosen: Sequence[Override]) -> None:
    """What an experiment sets must be a field of every run, or `sweeps`, which `command_lines` reads.

    Raises UsageError.
    """
    for override in chosen:
        if override.key_or_group == "experiment":
            known = {*composer.compose([]), "sweeps"}
            for name in map(str, composer.compose([override]).keys() - known):
                if name == "experiment":
                    raise UsageError(f"{override.input_line} sets nothing: its file needs the line # @package _global_")
                raise UsageError(f"{override.input_line} sets {name}, which is not a field of a run")


def _tell_twice(given: Sequence[Override]) -> None:
    """Say which of two values of a field counts: scripts that end in "$@" give a field twice on purpose."""
    last: dict[str, str] = {}
    for override in given:
        key, line = override.key_or_group, str(override.input_line)
        if last.get(key, line) != line:
            log.warning("%s is not used: %s is given after it", last[key], line)
        last[key] = line


def _refuse_hydras(override: Override) -> None:
    """What Hydra's launchers, sweepers, folders and logs did is done here, by -m, `launcher=` and `out=`."""
    key = override.key_or_group
    if re.split("[./]", key)[0] == "hydra":
        raise UsageError(
            f"{override.input_line} has no effect here: sweeps are run by launcher=local or launcher=slurm, whose "
            "fields are set as launcher.workers=2, and results go to out=; -m begins a sweep"
        )


def _refuse_frame(override: Override, alternatives: _Alternatives) -> None:
    """Fields that every cell has can be neither removed nor added to. Raises UsageError."""
    key = override.key_or_group
    above, _, name = key.rpartition(".")
    if is_hydras(override) or above not in ("", "engine"):
        if override.is_delete() and name == "_target_":
            raise UsageError(f"{override.input_line} would leave {above} without its class, which cannot be")
        config = alternatives.of("")[0]
        if override.is_add() and not is_hydras(override) and above.split(".")[0] not in config:
            raise _no_field(config, key)
        return
    if override.type is OverrideType.CHANGE:
        return
    config = alternatives.of(key.split(".")[0])[0]
    if not _has(config, key):
        raise _no_field(config, key)
    if override.is_delete():
        raise UsageError(f"{override.input_line} cannot be: {key} is a field of every run, give it another value")
    if override.is_add():
        raise UsageError(f"{override.input_line} cannot be: {key} is there already, write {key}=")


def _refuse_places(override: Override) -> None:
    """Hydra's ways of putting a group elsewhere, adding one or leaving it out: none of ours can be."""
    if override.key_or_group in GROUPS and override.type is not OverrideType.CHANGE:
        raise UsageError(
            f"{override.input_line} cannot be: {override.key_or_group} is there already, write it as "
            f"{override.key_or_group}="
        )
    if "/" in override.key_or_group or override.package:
        raise UsageError(
            f"{override.input_line} cannot be set: groups are {', '.join(GROUPS)}, and a field of one is written with "
            "dots, as policy.scorer.window=16"
        )


class _Alternatives:
    """The configurations of the choices a command line lists, as far as the check of a field needs them."""

    def __init__(self, composer: Composer, chosen: Sequence[Override]) -> None:
        self._composer = composer
        self._values = {o.get_key_element(): assignments(o, composer.folders) for o in chosen}

    def of(self, group: str) -> list[dict[str, Any]]:
        """One configuration for each value of a group that is swept, else the only one."""
        firsts = {key: parse(lines[0]) for key, lines in self._values.items()}
        if group in PARTS and group in self._values:
            names = [line.partition("=")[2] for line in self._values[group]]
            first = self._first
            return [{**first.first, group: first.part(group, _name(name))} for name in names]
        swept = self._values.get(group, [""])
        each = [{**firsts, group: parse(line)} if line else firsts for line in swept]
        return [plain(self._composer.compose(one.values())) for one in each]

    @cached_property
    def _first(self) -> Choices:
        return Choices(self._composer, [parse(lines[0]) for lines in self._values.values()])


def _name(text: str) -> str:
    """A name as the grammar reads it, quoted or not."""
    return str(parse(f"name={text}").value())


def _fit(override: Override, alternatives: _Alternatives) -> str:
    """The override, made to add the field where a configuration lacks what its part has. Raises UsageError."""
    assert override.input_line is not None
    _refuse_frame(override, alternatives)
    if override.type is not OverrideType.CHANGE or is_hydras(override):
        return override.input_line
    key, argument = override.key_or_group, override.input_line
    configs = alternatives.of(key.split(".")[0])
    if "." not in key and key not in configs[0]:  # a field of the task alone needs no `task.`
        of_tasks = alternatives.of("task")
        if any(_can_have(config, f"task.{key}") for config in of_tasks):
            key, argument, configs = f"task.{key}", f"task.{argument}", of_tasks
    if not any(_can_have(config, key) for config in configs):
        raise _no_field(configs[0], key)
    _refuse_unknown_inside(key, override.value(), configs)
    # Where the group itself is swept, Hydra first composes with its default, which may lack the field.
    return argument if len(configs) == 1 and _has(configs[0], key) else f"++{argument}"


def _refuse_unknown_inside(key: str, value: object, configs: Sequence[Mapping[str, Any]]) -> None:
    """`engine={rows: 1, bogus: 2}`: whatever is set at once must be a field as well. Raises UsageError."""
    if not isinstance(value, Mapping):
        return
    if not value:
        raise UsageError(f"{key}={{}} sets nothing, give it fields")
    for name, inner in value.items():
        inside = f"{key}.{name}"
        homes = [config for config in configs if isinstance(_parent(config, inside), Mapping)]
        if homes and not any(_can_have(config, inside) for config in homes):
            raise _no_field(homes[0], inside)
        _refuse_unknown_inside(inside, inner, configs)


def _no_field(config: Mapping[str, Any], key: str) -> UsageError:
    above, names = _neighbours(config, key)
    return UsageError(f"{key} is not a field{above}{did_you_mean(key.rpartition('.')[2], names)}")


def _parent(config: Mapping[str, Any], key: str) -> Any:  # noqa: ANN401 - whatever a configuration holds
    """What the last step of a dotted key would be a field of; None where there is no such place."""
    node: Any = config
    for step in key.split(".")[:-1]:
        node = node.get(step) if isinstance(node, Mapping) else None
    return node


def _has(config: Mapping[str, Any], key: str) -> bool:
    parent = _parent(config, key)
    return isinstance(parent, Mapping) and key.split(".")[-1] in parent


def _can_have(config: Mapping[str, Any], key: str) -> bool:
    """Whether a field is there, or left to its default by the part it would belong to."""
    parent = _parent(config, key)
    return isinstance(parent, Mapping) and (_has(config, key) or key.split(".")[-1] in field_names(parent))


def _neighbours(config: Mapping[str, Any], key: str) -> tuple[str, tuple[str, ...]]:
    """Where a wrong key went wrong (" of policy.scorer"), and the names that exist there."""
    while "." in key and not isinstance(_parent(config, key), Mapping):
        key = key.rpartition(".")[0]
    parent = _parent(config, key)
    assert isinstance(parent, Mapping)
    names = {str(name) for name in parent if not str(name).startswith("_")}
    above = key.rpartition(".")[0]
    more = field_names(parent) if above else GROUPS
    return f" of {above}" if above else "", tuple(sorted({*names, *more}))


def _local_model(argument: str) -> list[str]:
    """`model=/some/folder` says the same as `model=local model.path=/some/folder`; several may be swept."""
    key, _, value = argument.partition("=")
    if key != "model" or not ("/" in value or value.startswith("~")):
        return [argument]
    folders = [value] if os.path.exists(os.path.expanduser(value)) else value.split(",")
    return ["model=local", f"model.path={','.join(quoted(folder) for folder in folders)}"]
