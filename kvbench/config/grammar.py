"""One argument of a command line, as Hydra's grammar reads it: a field or a group, and the values it lists."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, ValueType
from hydra.errors import HydraException

from kvbench.config.choices import GROUPS
from kvbench.config.tree import names
from kvbench.errors import UsageError

_KEY = re.compile(r"[a-zA-Z_][\w.\-/@:]*", re.ASCII)
MOST = 10_000
"""So many values of a field are run at most, one by one in a sweep."""


@dataclass(frozen=True)
class Setting:
    """An argument. values: each with the words that say it. lists: whether it lists them as a sweep does."""

    line: str
    key: str
    values: tuple[tuple[str, Any], ...]
    lists: bool = False

    @property
    def is_group(self) -> bool:
        """Whether it chooses a file."""
        return self.key in GROUPS


def parse(argument: str, folders: Sequence[Path] = ()) -> Setting:
    """What an argument says. folders: of --config-dir, where glob() looks for names too. Raises UsageError."""
    override = _override(argument)
    key = override.get_key_element()
    if not override.is_sweep_override():
        values: tuple[tuple[str, Any], ...] = ((argument, override.value()),)
    else:
        values = tuple((f"{key}={text}", _override(f"{key}={text}").value()) for text in _listed(override, folders))
    if override.package or "/" in override.key_or_group:
        raise UsageError(
            f"{argument} cannot be set: groups are {', '.join(GROUPS)}, and a field of one is written with dots, as "
            "policy.scorer.window=16"
        )
    setting = Setting(argument, override.key_or_group, values, override.is_sweep_override())
    if not setting.is_group:
        return setting
    named = tuple((line, "null" if name is None else str(name)) for line, name in setting.values)
    return replace(setting, values=named)


def _override(argument: str) -> Override:
    key, equals, value = argument.partition("=")
    if not _KEY.fullmatch(key) or not equals:
        raise UsageError(f"{argument} cannot be read: write field=value, --help lists the fields")
    try:
        return OverridesParser.create().parse_override(argument)
    except HydraException as error:
        if not set(value) & set("'\",[]{}()"):  # what the grammar does not know, such as other letters, is text
            return _override(f"{key}={quoted(value)}")
        raise UsageError(
            f"{argument} cannot be read: {value} is no value, list or call of {key}=; a text that looks like one is "
            f"written in quotes: {key}=\"'...'\""
        ) from error


def _listed(override: Override, folders: Sequence[Path]) -> Iterable[str]:
    """Each value of a sweep, as it is written. Raises UsageError for a sweep that lists none, such as interval()."""
    if not override.is_discrete_sweep():
        raise UsageError(f"{override.input_line} names no values to run: write them, or range(first,end,step)")
    if override.value_type is ValueType.GLOB_CHOICE_SWEEP:
        pattern = override.value()
        assert isinstance(pattern, Glob)
        found = pattern.filter([name for name in names(override.key_or_group, folders) if "/" not in name])
        if not found:
            raise UsageError(f"{override.input_line} matches nothing")
        return list(found)
    try:
        values = list(itertools.islice(override.sweep_string_iterator(), MOST + 1))
    except ValueError as error:  # range() with a step of 0
        raise UsageError(f"{override.input_line} names no values to run: {error}") from error
    if not 0 < len(values) <= MOST:
        raise UsageError(f"{override.input_line} names {'no' if not values else f'more than {MOST}'} values to run")
    return values


def quoted(value: object) -> str:
    """A string as the grammar reads it whatever it holds: a backslash is special before a quote only."""
    return "'" + re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), str(value)) + "'"
