"""What a command line makes: Hydra's grammar read once, and a configuration for every cell of a sweep.

Hydra composes in 0.1 s, a cell's configuration differs from its neighbour's in a few fields. So each choice of model,
policy and task is composed once, by `kvbench.config.tree` where its file needs no more than that, by Hydra otherwise,
and every cell lays its values over the choices it names. A test holds the result equal to Hydra's own.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, OverrideType, ValueType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvbench.config.choices import GROUPS, check_choice
from kvbench.config.tree import Config, find, is_plain, merge, names, read
from kvbench.terminal.errors import UsageError

_KEY = re.compile(r"(\+\+?|~)?[a-zA-Z_][\w.\-/@:]*", re.ASCII)
MOST = 10_000
"""So many values of a field are run at most, one by one in a sweep."""
PARTS = ("model", "policy", "task")
"""The groups a sweep usually lists many choices of; their files write nowhere but under their own name."""


@dataclass(frozen=True)
class Combination:
    """One cell of a sweep as the command line asks for it."""

    title: str  # the values it has and others have not: "policy=snapkv budget=64"
    choices: Mapping[str, str]  # model, policy, task: the names chosen
    config: Config  # resolved
    preset: Config  # the same choices with no field set


# --- the grammar -------------------------------------------------------------------------------------------------
def parse(argument: str) -> Override:
    """An argument as Hydra's grammar reads it. Raises UsageError."""
    if any("\ud800" <= letter <= "\udfff" for letter in argument):  # bytes that the locale cannot read
        raise UsageError(f"{argument} cannot be read: it is no text in {sys.getfilesystemencoding()}")
    key, equals, value = argument.partition("=")
    if not _KEY.fullmatch(key) or not (equals or key.startswith("~")):
        raise UsageError(f"{argument} cannot be read: write field=value, --help lists the fields")
    try:
        return OverridesParser.create().parse_override(argument)
    except HydraException as error:
        if not set(value) & set("'\",[]{}()"):  # what the grammar does not know, such as other letters, is text
            return parse(f"{key}={quoted(value)}")
        raise UsageError(
            f"{argument} cannot be read: {value} is no value, list or call of {key}=; a text that looks like one is "
            f"written in quotes: {key}=\"'...'\""
        ) from error


def quoted(value: object) -> str:
    """A string as Hydra's grammar reads it whatever it holds: a backslash is special before a quote only."""
    return "'" + re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), str(value)) + "'"


def is_hydras(override: Override) -> bool:
    """Whether Hydra knows the key: a group, or a setting of its own."""
    return override.key_or_group in GROUPS or "/" in override.key_or_group or override.key_or_group.startswith("hydra")


def assignments(override: Override, folders: Sequence[Path] = ()) -> list[str]:
    """`key=value` for each value of an override. Raises UsageError for a sweep that lists none, such as interval()."""
    key = override.get_key_element()
    if not override.is_sweep_override():
        assert override.input_line is not None
        return [override.input_line]
    if not override.is_discrete_sweep():
        raise UsageError(f"{override.input_line} names no values to run: write them, or range(first,end,step)")
    if override.value_type is ValueType.GLOB_CHOICE_SWEEP:
        found = _matching(override, folders)
        if not found:
            raise UsageError(f"{override.input_line} matches nothing")
        return [f"{key}={name}" for name in found]
    try:
        values = list(itertools.islice(override.sweep_string_iterator(), MOST + 1))
    except ValueError as error:  # range() with a step of 0
        raise UsageError(f"{override.input_line} names no values to run: {error}") from error
    if not 0 < len(values) <= MOST:
        raise UsageError(f"{override.input_line} names {'no' if not values else f'more than {MOST}'} values to run")
    return [f"{key}={value}" for value in values]


def _matching(override: Override, folders: Sequence[Path]) -> list[str]:
    """The names a pattern matches: of files that stand in the group's folder itself, as Hydra has it."""
    pattern = override.value()
    assert isinstance(pattern, Glob)
    return list(pattern.filter([name for name in names(override.key_or_group, folders) if "/" not in name]))


def first_line(error: Exception) -> str:
    """The sentence of a library's error."""
    return str(error).strip().splitlines()[0]


# --- composing ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Composer:
    """Composes configurations, with the folder of --config-dir searched first."""

    folders: tuple[Path, ...] = ()

    def compose(self, overrides: Iterable[Override]) -> DictConfig:
        """The configuration these overrides make, the first value taken where one lists several. Raises UsageError."""
        overrides = list(overrides)
        for override in overrides:
            for name in self._names(override):
                check_choice(override.key_or_group, name, self.folders)
        last = {override.get_key_element(): assignments(override, self.folders)[0] for override in overrides}
        search = f"hydra.searchpath=[{','.join(quoted(f'file://{folder}') for folder in self.folders)}]"
        return _compose((*last.values(), *([search] if self.folders else [])))

    def _names(self, override: Override) -> Iterator[str]:
        """The names an override of a group gives; none for patterns such as glob(*): what they match is there."""
        if override.key_or_group not in GROUPS or override.value_type is ValueType.GLOB_CHOICE_SWEEP:
            return
        if override.is_sweep_override():
            yield from (line.partition("=")[2] for line in assignments(override))
        elif isinstance(override.value(), bool | int | float):
            raise UsageError(f"{override.input_line} is no name: a name that looks like a number is written in quotes")
        else:
            yield "null" if override.value() is None else str(override.value())


@lru_cache(maxsize=64)
def _compose(settings: tuple[str, ...]) -> DictConfig:
    try:
        with initialize_config_module("kvbench.conf", version_base="1.3"):
            return compose("config", overrides=list(settings), return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        said = " ".join(str(error).split()) if isinstance(error, yaml.YAMLError) else first_line(error)
        if said.startswith("Error merging override "):
            line = said.removeprefix("Error merging override ")
            raise UsageError(f"{line} is not allowed: {line.partition('=')[0]} has fields, set those") from error
        raise UsageError(said) from error


def plain(config: DictConfig, resolve: bool = False) -> Config:
    """A composed configuration as plain data, without Hydra's own settings."""
    ours = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    try:
        values = OmegaConf.to_container(ours, resolve=resolve)
    except OmegaConfBaseException as error:
        raise UsageError(f"{error.full_key or 'a field'} refers to what cannot be had: {first_line(error)}") from error
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


class Choices:
    """The configurations that all choices of model, policy and task make with the same other groups."""

    def __init__(self, composer: Composer, overrides: Sequence[Override]) -> None:
        """overrides: of groups and of Hydra's settings, one value each."""
        self._composer = composer
        self._overrides = {override.get_key_element(): override for override in overrides}
        composed = composer.compose(self._overrides.values())
        self.first = plain(composed)
        self.chosen = {group: str(composed.hydra.runtime.choices[group]) for group in PARTS}
        self._parts: dict[tuple[str, str], Config] = {(g, n): self.first[g] for g, n in self.chosen.items()}

    def config(self, choices: Mapping[str, str]) -> Config:
        """A fresh configuration with these choices, not yet resolved."""
        return deepcopy({**self.first, **{group: self.part(group, choices[group]) for group in PARTS}})

    def part(self, group: str, name: str) -> Config:
        """What stands under `group` where it is chosen as `name`. Raises UsageError."""
        key = (group, name)
        if key not in self._parts:
            check_choice(group, name, self._composer.folders)
            tree = self._read(group, name) if self._untouched[group] else None
            self._parts[key] = self._composed(group, name) if tree is None else tree
        return self._parts[key]

    @cached_property
    def _untouched(self) -> dict[str, bool]:
        """Of which groups nothing else (an experiment) changes what the choice says."""
        return {group: self._read(group, self.chosen[group]) == self.first[group] for group in PARTS}

    def _read(self, group: str, name: str) -> Config | None:
        folders = self._composer.folders
        if find(group, name, folders):
            return read(group, name, folders) if is_plain(group, name, folders) else None
        if group != "policy":
            return None
        from kvbench.config.presets import policy_config  # imports torch, which --help need not wait for

        return policy_config(name, folders)

    def _composed(self, group: str, name: str) -> Config:
        config = plain(self._composer.compose([*self._overrides.values(), parse(f"{group}={name}")]))
        others = [key for key in {*config, *self.first} - {group} if config.get(key) != self.first.get(key)]
        if others:
            raise UsageError(f"{group}={name} also sets {others[0]}: a sweep over {group} needs files that do not")
        return dict(config[group])


def combinations(composer: Composer, overrides: Sequence[Override]) -> list[Combination]:
    """Every combination of the values that `overrides` list, in the order of Hydra's own sweeps. Raises UsageError."""
    listed = {o.get_key_element(): [parse(line) for line in assignments(o, composer.folders)] for o in overrides}
    swept = [key for key, values in listed.items() if len(values) > 1] or [*filter(_tells_what, listed)]
    choices: dict[tuple[str, ...], tuple[Choices, Choices]] = {}
    found = []
    for cell in itertools.product(*listed.values()):
        frame = [o for o in cell if is_hydras(o) and o.key_or_group not in PARTS]
        lines = tuple(str(o.input_line) for o in frame)
        if lines not in choices:
            parts = [o for o in cell if o.key_or_group in PARTS]
            choices[lines] = Choices(composer, [*frame, *parts]), Choices(composer, parts)
        own, bare = choices[lines]
        chosen = own.chosen | {o.key_or_group: str(o.value()) for o in cell if o.key_or_group in PARTS}
        config = own.config(chosen)
        for override in cell:
            if not is_hydras(override):
                lay(config, override)
        words = [str(o.input_line) for o in cell if o.get_key_element() in swept] or [f"policy={chosen['policy']}"]
        found.append(Combination(" ".join(words), chosen, resolved(config), resolved(bare.config(chosen))))
    return found


def _tells_what(key: str) -> bool:
    """Whether a field tells what a cell is, not where it is computed, told and kept."""
    return key.lstrip("+~").partition(".")[0] not in ("launcher", "logger", "out", "debug")


def lay(config: Config, override: Override) -> None:
    """Set one field of a plain configuration as Hydra would. Raises UsageError."""
    *above, name = override.key_or_group.split(".")
    node = config
    for step in above:
        inner = node.get(step)
        if inner is None:
            inner = node[step] = {}
        if not isinstance(inner, dict):
            raise UsageError(f"{override.key_or_group} is not a field: {step} has none")
        node = inner
    value = _value(override.value())
    if override.type is OverrideType.DEL:
        if name not in node:
            raise UsageError(f"{override.input_line}: there is no {override.key_or_group}")
        del node[name]
    elif isinstance(value, dict) and isinstance(node.get(name), dict):
        merge(node[name], value)
    else:
        node[name] = value


def _value(value: Any) -> Any:  # noqa: ANN401 - whatever the grammar knows
    """A parsed value as plain data: quoted strings without their quotes."""
    return OmegaConf.to_container(OmegaConf.create({"value": value}))["value"]  # type: ignore[call-overload,index]


def resolved(config: Config) -> Config:
    """The configuration with every `${...}` replaced. Raises UsageError."""
    return plain(OmegaConf.create(config), resolve=True) if _refers(config) else config


def _refers(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_refers, value.values()))
    if isinstance(value, list):
        return any(map(_refers, value))
    return isinstance(value, str) and "${" in value
