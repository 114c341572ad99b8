"""The command line before Hydra acts on it: every override checked, so that a wrong one is answered in one sentence."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from hydra import compose, initialize_config_module
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, ValueType
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvbench.config.choices import GROUPS, check_choice, did_you_mean
from kvbench.config.tree import field_names
from kvbench.tasks.extras import missing
from kvbench.terminal.errors import UsageError, refusing

MULTIRUN_FLAGS = ("-m", "--multirun")


@dataclass(frozen=True)
class Asked:
    """A checked command line: the arguments as Hydra needs them, and the configuration of its first cell."""

    arguments: list[str]
    config: DictConfig  # with the node `hydra`

    @property
    def is_sweep(self) -> bool:
        """Whether several cells are asked for, by -m or by an experiment."""
        flagged = any(flag in self.arguments for flag in MULTIRUN_FLAGS)
        return flagged or self.config.hydra.mode == RunMode.MULTIRUN


def check(arguments: Sequence[str]) -> Asked:
    """Check a command line without running anything.

    Rewritten for Hydra: flags come first, a folder as `model=` becomes `model.path=`, `num_fewshot=8` becomes
    `task.num_fewshot=8`, a policy or task without a file is registered, and a field that a part has but its YAML leaves
    to the default is made settable. Raises UsageError.
    """
    told = get_args_parser().parse_intermixed_args(list(arguments))
    flags = [argument for argument in arguments if argument not in told.overrides]
    given = [_parse(part) for argument in told.overrides for part in _local_model(argument)]
    composer = _Composer((Path(told.config_dir).resolve(),) if told.config_dir else ())
    groups = [o for o in given if _is_hydras(o)]
    params = OmegaConf.select(composer.compose(groups), "hydra.sweeper.params") or {}
    chosen = [*(_parse(f"{key}={value}") for key, value in params.items()), *groups]
    with refusing():
        fitted = [_fit(o, composer, chosen) for o in given]
    asked = Asked([*flags, *fitted], composer.compose([*chosen, *map(_parse, fitted)]))
    listed = [o.input_line for o in given if o.is_sweep_override()]
    if listed and not asked.is_sweep:
        raise UsageError(f"{listed[0]} names several values: add -m to run them all")
    return asked


def quoted(value: object) -> str:
    """A string as Hydra's grammar reads it whatever it holds: a backslash is special before a quote only."""
    return "'" + re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), str(value)) + "'"


@dataclass(frozen=True)
class _Composer:
    """Composes configurations, with the folder of --config-dir searched first."""

    folders: tuple[Path, ...]

    def compose(self, overrides: Iterable[Override]) -> DictConfig:
        """The configuration these overrides make, the first value taken where one lists several. Raises UsageError."""
        overrides = list(overrides)
        for override in overrides:
            for name in _names(override):
                check_choice(override.key_or_group, name, self.folders)
        last = {override.get_key_element(): next(_assignments(override)) for override in overrides}
        search = f"hydra.searchpath=[{','.join(quoted(f'file://{folder}') for folder in self.folders)}]"
        return _compose((*last.values(), *([search] if self.folders else [])))

    def alternatives(self, group: str, overrides: Sequence[Override]) -> list[DictConfig]:
        """One configuration for each value of a group that is swept, else the only one."""
        swept = [o for o in overrides if o.key_or_group == group and o.is_sweep_override()]
        rest = [o for o in overrides if o.key_or_group != group]
        each = [[*rest, _parse(assignment)] for assignment in _assignments(swept[-1])] if swept else [overrides]
        return [self.compose(one) for one in each]


@lru_cache(maxsize=64)  # 0.1 s each, and every field of a task asks for the same one
def _compose(settings: tuple[str, ...]) -> DictConfig:
    try:
        with initialize_config_module("kvbench.conf", version_base="1.3"):
            return compose("config", overrides=list(settings), return_hydra_config=True)
    except MissingConfigException as error:
        if error.missing_cfg_file and "submitit" in error.missing_cfg_file:
            raise UsageError(missing("slurm", "launcher=slurm", "hydra-submitit-launcher")) from error
        raise UsageError(_first_line(error)) from error
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(_first_line(error)) from error


def _fit(override: Override, composer: _Composer, chosen: Sequence[Override]) -> str:
    """The override, made to add the field where a configuration lacks what its part has. Raises UsageError."""
    assert override.input_line is not None
    if override.type is not OverrideType.CHANGE or _is_hydras(override):
        return override.input_line
    key, argument = override.key_or_group, override.input_line
    configs = composer.alternatives(key.split(".")[0], chosen)
    if "." not in key and key not in configs[0]:  # a field of the task alone needs no `task.`
        of_tasks = composer.alternatives("task", chosen)
        if any(_can_have(config, f"task.{key}") for config in of_tasks):
            key, argument, configs = f"task.{key}", f"task.{argument}", of_tasks
    if not any(_can_have(config, key) for config in configs):
        above, names = _neighbours(configs[0], key)
        raise UsageError(f"{key} is not a field{above}{did_you_mean(key.split('.')[-1], names)}")
    # Where the group itself is swept, Hydra first composes with its default, which may lack the field.
    return argument if len(configs) == 1 and _has(configs[0], key) else f"++{argument}"


def _parent(config: DictConfig, key: str) -> object:
    above = key.rpartition(".")[0]
    return OmegaConf.select(config, above) if above else config


def _has(config: DictConfig, key: str) -> bool:
    parent = _parent(config, key)
    return isinstance(parent, DictConfig) and key.split(".")[-1] in parent


def _can_have(config: DictConfig, key: str) -> bool:
    """Whether a field is there, or left to its default by the part it would belong to."""
    parent = _parent(config, key)
    return isinstance(parent, DictConfig) and (_has(config, key) or key.split(".")[-1] in field_names(parent))


def _neighbours(config: DictConfig, key: str) -> tuple[str, tuple[str, ...]]:
    """Where a wrong key went wrong (" of policy.scorer"), and the names that exist there."""
    while "." in key and not isinstance(_parent(config, key), DictConfig):
        key = key.rpartition(".")[0]
    parent = _parent(config, key)
    assert isinstance(parent, DictConfig)
    names = {str(name) for name in parent if not str(name).startswith("_") and name != "hydra"}
    above = key.rpartition(".")[0]
    more = field_names(parent) if above else GROUPS
    return f" of {above}" if above else "", tuple(sorted({*names, *more}))


def _parse(argument: str) -> Override:
    if "=" not in argument and not argument.startswith("~"):
        raise UsageError(f"{argument} cannot be read: write field=value, --help lists the fields")
    try:
        return OverridesParser.create().parse_override(argument)
    except HydraException as error:
        raise UsageError(f"{argument} cannot be read: {_first_line(error)}") from error


def _is_hydras(override: Override) -> bool:
    """Whether Hydra knows the key: a group, or a setting of its own."""
    return override.key_or_group in GROUPS or "/" in override.key_or_group or override.key_or_group.startswith("hydra")


def _names(override: Override) -> Iterator[str]:
    """The names an override of a group gives; none for patterns such as glob(*), which Hydra matches itself."""
    if override.key_or_group not in GROUPS or override.value_type is ValueType.GLOB_CHOICE_SWEEP:
        return
    if override.is_sweep_override():
        yield from override.sweep_string_iterator()
    else:
        yield str(override.value())


def _assignments(override: Override) -> Iterator[str]:
    """`key=value` for each value of an override; a deletion, or a pattern's first match, is Hydra's affair."""
    key = override.get_key_element()
    if override.is_sweep_override() and override.value_type is not ValueType.GLOB_CHOICE_SWEEP:
        yield from (f"{key}={value}" for value in override.sweep_string_iterator())
    else:
        assert override.input_line is not None
        yield override.input_line


def _local_model(argument: str) -> list[str]:
    """`model=/some/folder` says the same as `model=local model.path=/some/folder`; several may be swept."""
    key, _, value = argument.partition("=")
    if key != "model" or not ("/" in value or value.startswith("~")):
        return [argument]
    folders = [value] if Path(value).expanduser().exists() else value.split(",")
    return ["model=local", f"model.path={','.join(quoted(folder) for folder in folders)}"]


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
