"""The command line before Hydra acts on it: every override checked, so that a wrong one is answered in one sentence."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, ValueType
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvbench.choices import GROUPS, check_choice, did_you_mean
from kvbench.errors import UsageError
from kvbench.tasks.extras import missing

TASK_FIELDS = ("num_fewshot", "apply_chat_template", "allow_code_execution")
MULTIRUN_FLAGS = ("-m", "--multirun")
_FLAGS_WITH_VALUE = (
    "--config-dir",
    "-cd",
    "--config-path",
    "-cp",
    "--config-name",
    "-cn",
    "--package",
    "-p",
    "--cfg",
    "-c",
)


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

    Rewritten for Hydra: a folder as `model=` becomes `model.path=`, `num_fewshot=8` becomes `task.num_fewshot=8`, a
    policy or task without a file is registered, and a field that a part has but its YAML leaves to the default is made
    settable. Raises UsageError.
    """
    arguments = [_task_field(part) for argument in _flags_first(arguments) for part in _local_model(argument)]
    given = {argument: _parse(argument) for argument in _without_flags(arguments)}
    composer = _Composer(_config_dirs(arguments))
    composer.check_groups(given.values())
    groups = [o for o in given.values() if _is_group(o) or o.key_or_group.startswith("hydra")]
    params = OmegaConf.select(composer.compose(groups), "hydra.sweeper.params") or {}
    swept = [_parse(f"{key}={value}") for key, value in params.items()]
    composer.check_groups(swept)
    fitted = {a: _fit(a, o, composer.alternatives([*swept, *groups], o)) for a, o in given.items()}
    asked = Asked(
        arguments=[fitted.get(argument, argument) for argument in arguments],
        config=composer.compose([*swept, *(_parse(argument) for argument in fitted.values())]),
    )
    listed = [a for a, o in given.items() if o.is_sweep_override()]
    if listed and not asked.is_sweep:
        raise UsageError(f"{listed[0]} names several values: add -m to run them all")
    return asked


def quoted(value: object) -> str:
    """A string as Hydra's grammar reads it whatever it holds: a backslash is special before a quote only."""
    return "'" + re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), str(value)) + "'"


@dataclass(frozen=True)
class _Composer:
    """Composes configurations, with the folders of --config-dir searched first."""

    config_dirs: tuple[Path, ...]

    def check_groups(self, overrides: Iterable[Override]) -> None:
        """Raise UsageError for a choice that does not exist."""
        for override in overrides:
            if override.key_or_group in GROUPS:
                for name in _values(override):
                    check_choice(override.key_or_group, name, self.config_dirs)

    def compose(self, overrides: Iterable[Override]) -> DictConfig:
        """The configuration these overrides make, the first value taken where one lists several. Raises UsageError."""
        last = {override.get_key_element(): next(_assignments(override)) for override in overrides}
        search = f"hydra.searchpath=[{','.join(quoted(f'file://{d}') for d in self.config_dirs)}]"
        return _compose((*last.values(), *([search] if self.config_dirs else [])))

    def alternatives(self, overrides: Sequence[Override], asked: Override) -> list[DictConfig]:
        """The configurations in which a field must exist: one for each value of its group, where that is swept."""
        group = asked.key_or_group.split(".")[0]
        if _is_group(asked) or asked.key_or_group.startswith("hydra"):
            return []
        swept = [o for o in overrides if o.key_or_group == group and o.is_sweep_override()]
        if not swept:
            return [self.compose(overrides)]
        rest = [o for o in overrides if o.key_or_group != group]
        return [self.compose([*rest, _parse(assignment)]) for assignment in _assignments(swept[-1])]


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


def _fit(argument: str, override: Override, configs: Sequence[DictConfig]) -> str:
    """`argument`, made to add the field where a configuration lacks what its part has. Raises UsageError."""
    key = override.key_or_group
    if override.type is not OverrideType.CHANGE or not configs:
        return argument
    if all(_has(config, key) for config in configs):
        # Where the group itself is swept, Hydra first composes with its default, which may lack the field.
        return f"++{argument}" if len(configs) > 1 else argument
    if any(_has(config, key) or key.split(".")[-1] in _part_fields(config, key) for config in configs):
        return f"++{argument}"
    above, names = _neighbours(configs[0], key)
    raise UsageError(f"{key} is not a field{above}{did_you_mean(key.split('.')[-1], names)}")


def _has(config: DictConfig, key: str) -> bool:
    parent = _parent(config, key)
    return isinstance(parent, DictConfig) and key.split(".")[-1] in parent


def _parent(config: DictConfig, key: str) -> object:
    above = key.rpartition(".")[0]
    return OmegaConf.select(config, above) if above else config


def _part_fields(config: DictConfig, key: str) -> tuple[str, ...]:
    """The fields of the part that `key` would belong to: those of the class its `_target_` names."""
    parent = _parent(config, key)
    if not isinstance(parent, DictConfig) or "_target_" not in parent:
        return ()
    part = get_class(parent._target_)
    return tuple(f.name for f in fields(part) if f.init) if is_dataclass(part) else ()


def _neighbours(config: DictConfig, key: str) -> tuple[str, tuple[str, ...]]:
    """Where a wrong key went wrong (" of policy.scorer"), and the names that exist there."""
    while "." in key and not isinstance(_parent(config, key), DictConfig):
        key = key.rpartition(".")[0]
    parent = _parent(config, key)
    assert isinstance(parent, DictConfig)
    names = {str(name) for name in parent if not str(name).startswith("_") and name != "hydra"}
    above = key.rpartition(".")[0]
    more = _part_fields(config, key) if above else GROUPS
    return f" of {above}" if above else "", tuple(sorted({*names, *more}))


def _parse(argument: str) -> Override:
    if "=" not in argument and not argument.startswith("~"):
        raise UsageError(f"{argument} cannot be read: write field=value, --help lists the fields")
    try:
        return OverridesParser.create().parse_override(argument)
    except HydraException as error:
        raise UsageError(f"{argument} cannot be read: {_first_line(error)}") from error


def _is_group(override: Override) -> bool:
    return override.key_or_group in GROUPS or "/" in override.key_or_group


def _values(override: Override) -> Iterator[str]:
    """The names an override of a group gives; none for patterns such as glob(*), which Hydra matches itself."""
    if override.value_type is ValueType.GLOB_CHOICE_SWEEP:
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


def _task_field(argument: str) -> str:
    """`num_fewshot=8` says the same as `task.num_fewshot=8`, as it does on lm-eval's command line."""
    return f"task.{argument}" if argument.partition("=")[0] in TASK_FIELDS else argument


def _without_flags(arguments: Sequence[str]) -> list[str]:
    """The overrides among the arguments: neither Hydra's flags nor the words that belong to them."""
    values = {b for a, b in pairwise(arguments) if a in _FLAGS_WITH_VALUE}
    return [a for a in arguments if not a.startswith("-") and a not in values]


def _flags_first(arguments: Sequence[str]) -> list[str]:
    """The same arguments in the only order Hydra's parser takes: `-m` may stand anywhere for us."""
    fields = _without_flags(arguments)
    return [*(argument for argument in arguments if argument not in fields), *fields]


def _config_dirs(arguments: Sequence[str]) -> tuple[Path, ...]:
    """The folder of `--config-dir X` or `--config-dir=X`, which Hydra searches before ours."""
    found = [a.partition("=")[2] for a in arguments if a.startswith("--config-dir=")]
    found += [b for a, b in pairwise(arguments) if a in ("--config-dir", "-cd")]
    return tuple(Path(folder).resolve() for folder in found)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
