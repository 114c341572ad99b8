"""Objects that are built from configurations: a `_target_` that names a class, and its fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from inspect import isabstract
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from omegaconf import BooleanNode, FloatNode, IntegerNode, ValidationError

from kvbench.errors import ConfigError, UsageError, a_kind, first_line, instead

INTERNAL = {"internal": True}
"""The metadata of a field that no configuration sets."""
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "null"}


def part_class(config: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """The class named by `_target_`. Raises ConfigError if it cannot be imported or is not a concrete class."""
    module, _, name = str(config["_target_"]).rpartition(".")
    if "<locals>" in module:
        why = "is defined inside a function, where no other process finds it: move it to the top level of a module"
        raise ConfigError("_target_", config["_target_"], why=why)
    try:
        part = getattr(import_module(module), name)
    except Exception as error:  # importing runs a module of the user, in which anything may be wrong
        missing = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
        more = (
            "; it must be in the working folder, beside the folder of --config-dir, installed or on PYTHONPATH"
            if missing
            else ""
        )
        why = str(error) if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: {error}"
        raise ConfigError("_target_", config["_target_"], why=f"cannot be imported: {why}{more}") from error
    if not isinstance(part, type) or isabstract(part):
        raise ConfigError("_target_", config["_target_"], why="is not a class that can be built")
    return part


def field_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields of the class that a configuration builds, also those left to their defaults."""
    part = part_class(config) if "_target_" in config else None
    return tuple(f.name for f in dataclasses.fields(part) if f.init) if dataclasses.is_dataclass(part) else ()


def build(config: Any, where: Sequence[str] = ()) -> Any:  # noqa: ANN401
    """The object that a configuration describes; where: its place in a larger one, named in errors.

    Raises ConfigError for an unknown or missing field and for a value of the wrong type.
    """
    if isinstance(config, list | tuple):
        return [build(item, where) for item in config]
    if not isinstance(config, Mapping):
        return config
    given = {key: build(value, (*where, str(key))) for key, value in config.items() if key not in _SPECIAL}
    if "_target_" not in config:
        return given
    try:
        part = part_class(config)
        if dataclasses.is_dataclass(part):
            given = converted(part, given)
            check_fields(part, given)
        return part(**given)
    except ConfigError as error:
        raise error.at(*where) from error
    except TypeError as error:
        raise UsageError(f"{'.'.join(where) or config['_target_']}: {error}") from error


_SPECIAL = ("_target_", "_convert_")


def tree_of(part: object) -> Any:  # noqa: ANN401 - whatever YAML holds
    """The configuration from which `build` makes an object: the inverse, for dataclasses of plain values."""
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        inner = {f.name: tree_of(getattr(part, f.name)) for f in dataclasses.fields(part) if f.init}
        return {"_target_": f"{type(part).__module__}.{type(part).__qualname__}", **inner}
    if isinstance(part, Mapping):
        return {str(key): tree_of(value) for key, value in part.items()}
    if isinstance(part, list | tuple):
        return [tree_of(item) for item in part]
    if isinstance(part, str | int | float | None):
        return part
    raise UsageError(f"{a_kind(type(part))} cannot be recorded: a run holds plain values and dataclasses of them")


def check_fields(part: Any, given: Mapping[str, Any]) -> None:  # noqa: ANN401 - a dataclass
    """Raise ConfigError for an unknown field, a missing one, or a value of another type than its field declares."""
    declared = [f for f in dataclasses.fields(part) if f.init and f.metadata != INTERNAL]
    allowed = [f.name for f in declared]
    for name, value in given.items():
        if name not in allowed:
            raise ConfigError(
                name, value, why=f"is not a field of {part.__name__}{instead(name, allowed, noun='field')}"
            )
    for f in declared:
        if f.name not in given and f.default is f.default_factory is dataclasses.MISSING:
            raise ConfigError(f.name, None, why=f": {part.__name__} needs a value")
    hints = _hints(part)
    for name, value in given.items():
        _check_type(name, value, hints[name])


def converted(part: Any, given: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ANN401 - a dataclass
    """The fields, with texts read as the numbers that the class declares: `${oc.env:X}` is always a text."""
    hints = _hints(part)
    return {name: _number(value, hints.get(name)) if isinstance(value, str) else value for name, value in given.items()}


def _number(text: str, hint: Any) -> Any:  # noqa: ANN401
    """A text as OmegaConf reads it into the type of a field; unchanged if it cannot, or if the field may be a text."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    for kind, node in ((bool, BooleanNode), (int, IntegerNode), (float, FloatNode)) if str not in kinds else ():
        with suppress(ValidationError):
            if kind in kinds:
                return node(value=text)._value()
    return text


@cache
def _hints(part: type) -> dict[str, Any]:
    """The declared types of a class; hundreds of runs use a handful of parts."""
    return get_type_hints(part)


def _check_type(name: str, value: object, hint: Any) -> None:  # noqa: ANN401
    """ConfigError for a value of another type than its field declares; other annotations are left to the part."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if all(kind in KINDS for kind in kinds):
        if not any(_is_a(value, kind) for kind in kinds):
            wanted = [KINDS[kind] for kind in kinds if kind is not int or float not in kinds]
            raise ConfigError(name, value, " or ".join(wanted))
    elif all(isinstance(kind, type) for kind in kinds) and not isinstance(value, tuple(kinds)):
        if isinstance(value, Mapping):
            raise ConfigError(name, value, why="is not a part: it has no _target_ that names its class")
        classes = " or ".join(kind.__name__ for kind in kinds if kind is not NoneType)
        raise ConfigError(name, value if type(value) in (*KINDS, list) else type(value), f"a {classes}")


def _is_a(value: object, kind: type) -> bool:
    """Whether a value is of a type. A whole number is a number, but true is not a number."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


# --- errors ------------------------------------------------------------------------------------------------------
@contextmanager
def refusing_in(group: str, config: Mapping[str, Any], prefix: str = "") -> Iterator[None]:
    """Turn the ValueError of a check on `config`, the configuration of `group`, into a UsageError.

    The field of a ConfigError gets its path (`window` of a scorer is `policy.scorer.window`), another message `prefix`.
    """
    try:
        yield
    except ConfigError as error:
        raise _placed(group, config, error, prefix) from error
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(f"{prefix}{first_line(error)}") from error


def _placed(group: str, config: Mapping[str, Any], error: ConfigError, prefix: str) -> UsageError:
    """The error with the path of its field: in the only part that has it, or in `config` itself."""

    def known(part: Mapping[str, Any]) -> set[str]:
        with suppress(ConfigError):  # its class cannot be imported, which is then the error itself
            return {*field_names(part), *part}
        return {*part}

    if error.field.startswith(f"{group}."):
        return error
    first = error.field.partition(".")[0]
    homes = [name for name, part in config.items() if isinstance(part, Mapping) and first in known(part)]
    if len(homes) == 1 and first not in config:
        return error.at(group, *homes)
    return error.at(group) if first in known(config) else UsageError(f"{prefix}{error}")
