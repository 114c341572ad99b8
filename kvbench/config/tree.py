"""Trees of parts: read from the files of conf/, merged, checked against what each part declares of itself, and built.

The one reader and builder, of `make_policy` and of the command line: plain YAML, in the form Hydra gave it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module, resources
from inspect import isabstract
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml

from kvbench.errors import ConfigError

Config = dict[str, Any]
CONF = Path(str(resources.files("kvbench.conf")))
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # written in C where there is one: 8 times as fast
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "null"}


# --- reading -----------------------------------------------------------------------------------------------------
def names(group: str, folders: Sequence[Path] = ()) -> tuple[str, ...]:
    """The names that have a file in conf/<group>/, or in the same folder of `folders` (of --config-dir), sorted."""
    roots = [folder / group for folder in (*folders, CONF)]
    files = [(root, file) for root in roots for file in root.rglob("*.yaml") if file.is_file()]
    return tuple(sorted({str(file.relative_to(root).with_suffix("")) for root, file in files}))


def find(group: str, name: str, folders: Sequence[Path] = ()) -> Path | None:
    """The file of a name, `folders` searched before conf/; None where there is none."""
    if ".." in name or name.startswith("/"):
        return None
    files = (folder / group / f"{name}.yaml" for folder in (*folders, CONF))
    return next((file for file in files if file.is_file()), None)


def read(group: str, name: str, folders: Sequence[Path] = ()) -> Config:
    """The tree of a file that `find` finds; a `defaults` list of other names is merged in first, as Hydra does.

    A name stands there alone (`snapkv`) or as Hydra writes one of another folder (`/task/longbench/qasper@_here_`), or
    with the field it is to be (`ruler/vt@tasks.vt`).
    """
    file = find(group, name, folders)
    if file is None:
        raise ValueError(f"{group}={name} does not exist (allowed: {', '.join(names(group, folders))})")
    own = load(file)
    config: Config = {}
    bases = own.pop("defaults", [])
    for base in bases if "_self_" in bases else [*bases, "_self_"]:
        if base == "_self_":
            merge(config, own)
            continue
        inherited, _, place = str(base).removeprefix(f"/{group}/").partition("@")
        if find(group, inherited, folders) is None:
            raise ValueError(f"{file} cannot be read: its defaults name {group}={inherited}, which does not exist")
        try:
            tree = read(group, inherited, folders)
        except RecursionError as error:
            raise ValueError(f"{file} cannot be read: its defaults lead back to it") from error
        for step in reversed(place.split(".") if place not in ("", "_here_") else []):
            tree = {step: tree}
        merge(config, tree)
    return config


def load(file: Path) -> Config:
    """What a file says by itself."""
    try:
        own = yaml.load(file.read_text(encoding="utf-8-sig"), _Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{file} cannot be read: {' '.join(str(error).split())}") from error
    own = {} if own is None else own
    if not isinstance(own, dict) or not all(isinstance(key, str) for key in own):
        raise ValueError(f"{file} cannot be read: it must have fields, such as _target_, or a list of defaults")
    if not isinstance(own.get("defaults", []), list):
        raise ValueError(f"{file} cannot be read: defaults={own['defaults']} must be a list, such as [snapkv]")
    return own


class _Loader(_LOADER):  # type: ignore[misc, valid-type]
    """Of two values of one field the last would win in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Config:
        given = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        twice = next((key for key, times in given.items() if times > 1 and key != "<<"), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"{twice} is given twice", node.start_mark)
        found: Config = super().construct_mapping(node, deep)
        return found


def merge(config: Config, other: Mapping[str, Any]) -> Config:
    """Take `other` into `config`, part by part and field by field; returns `config`."""
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(config.get(key), dict):
            merge(config[key], value)
        else:
            config[key] = value
    return config


# --- checking and building -----------------------------------------------------------------------------------------
def part_class(config: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """The class a tree's `_target_` names; ValueError where there is none."""
    module, _, name = str(config["_target_"]).rpartition(".")

    def wrong(why: str) -> ConfigError:
        return ConfigError("_target_", config["_target_"], why=why)

    if not module or not name:
        raise wrong("is not a class: write its module, a dot and its name")
    try:
        part = getattr(import_module(module), name)
    except Exception as error:  # importing runs a module of the user's, in which anything may be wrong
        raise wrong(f"cannot be imported: {error}") from error
    if not isinstance(part, type):
        raise wrong("is not a class")
    if isabstract(part):
        raise wrong("is abstract: name a class that is made of it")
    return part


def field_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields of the part a tree describes, whether the tree has them or leaves them to their defaults."""
    part = part_class(config) if "_target_" in config else None
    return tuple(f.name for f in dataclasses.fields(part) if f.init) if dataclasses.is_dataclass(part) else ()


def build(config: Any, where: Sequence[str] = ()) -> Any:  # noqa: ANN401
    """The object a tree describes; where: its place in a larger one.

    ValueError for a field its part does not have, lacks, or does not take: see ConfigError.
    """
    if isinstance(config, list | tuple):
        return [build(item, where) for item in config]
    if not isinstance(config, Mapping):
        return config
    own = {key: value for key, value in config.items() if key not in ("_target_", "_convert_")}
    given = {key: build(value, (*where, str(key))) for key, value in own.items()}
    if "_target_" not in config:
        return given
    try:
        part = part_class(config)
        if dataclasses.is_dataclass(part):
            _check_fields(part, given)
        return part(**given)
    except ConfigError as error:
        raise error.at(*where) from error
    except TypeError as error:
        raise ValueError(str(error)) from error


def _check_fields(part: Any, given: Config) -> None:  # noqa: ANN401 - a dataclass
    declared = [f for f in dataclasses.fields(part) if f.init]
    allowed = [f.name for f in declared]
    for name in given:
        if name not in allowed:
            raise ValueError(f"{part.__name__} has no field {name!r} (allowed: {', '.join(allowed) or 'none'})")
    for f in declared:
        if f.name not in given and f.default is f.default_factory is dataclasses.MISSING:
            raise ValueError(f"{part.__name__} needs {f.name}")
    hints = _hints(part)
    for name, value in given.items():
        _check_kind(name, value, hints[name])


@cache
def _hints(part: type) -> dict[str, Any]:
    """What a part declares of its fields; hundreds of cells ask for a handful of parts."""
    return get_type_hints(part)


def _check_kind(name: str, value: object, hint: Any) -> None:  # noqa: ANN401
    """ValueError for a plain value of another kind than its field declares; the parts check the rest themselves."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if all(kind in KINDS for kind in kinds):
        if not any(_is_a(value, kind) for kind in kinds):
            raise ConfigError(name, value, " or ".join(KINDS[kind] for kind in kinds))
    elif all(isinstance(kind, type) for kind in kinds) and not isinstance(value, tuple(kinds)):
        if isinstance(value, Mapping):
            raise ConfigError(name, value, why="is not a part: it has no _target_ that names its class")
        if type(value) not in (*KINDS, list):  # built, but as another part
            wanted = " or ".join(kind.__name__ for kind in kinds if kind is not NoneType)
            raise ConfigError(name, type(value), f"a {wanted}")
        raise ConfigError(name, value, why="is not a part: choose a policy that has it, then set fields of it")


def _is_a(value: object, kind: type) -> bool:
    """Whether a value may stand where `kind` is declared: a whole number may for a number, but true is no number."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)
