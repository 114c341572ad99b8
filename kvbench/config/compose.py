"""Configuration files by name, composed by Hydra.

Hydra composes every file, on the command line and in Python, so a file means the same in both: `defaults` lists,
groups placed in a part (`scorers@scorer: wide`) and interpolations (`${oc.env:WINDOW,8}`). Python composes in a
Hydra context of its own and then restores the caller's, so it also works inside another Hydra application.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from importlib import resources
from pathlib import Path
from threading import RLock
from typing import Any

import yaml

from kvbench.errors import ConfigError, UsageError, first_line, hub, instead, unknown

Config = dict[str, Any]
CONF = Path(str(resources.files("kvbench.conf")))
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # written in C if available: 8 times as fast
_LOCK = RLock()  # Hydra's state is global
_COMPOSED: dict[tuple[object, ...], Config] = {}
TOGETHER = 30  # files in one composition
OWN_FOLDERS: ContextVar[tuple[Path, ...] | None] = ContextVar("folders", default=None)
"""The folders of the configuration that Python composes; None on the command line."""


def names(group: str, folders: Sequence[Path] = ()) -> tuple[str, ...]:
    """The sorted names of the files in conf/<group>/ and in the same folder of `folders` (--config-dir)."""
    roots = [folder / group for folder in (*folders, CONF)]
    files = [(root, file) for root in roots for file in root.rglob("*.yaml") if file.is_file()]
    return tuple(sorted({str(file.relative_to(root).with_suffix("")) for root, file in files}))


def find(group: str, name: str, folders: Sequence[Path] = ()) -> Path | None:
    """The file of a name: of `folders`, else of conf/; None if there is none."""
    if ".." in name or name.startswith("/"):
        return None
    files = (folder / group / f"{name}.yaml" for folder in (*folders, CONF))
    return next((file for file in files if file.is_file()), None)


def read(group: str, name: str, folders: Sequence[Path] = ()) -> Config:
    """The composed configuration of a file, with its interpolations: see `resolved`.

    Raises UsageError if the file does not exist or cannot be composed.
    """
    if find(group, name, folders) is None:
        raise unknown(group, name, names(group, folders), hub(group, name))
    files = [file for folder in folders for file in sorted(folder.rglob("*.yaml"))]
    changes = tuple((file, file.stat().st_mtime_ns) for file in files)  # a notebook edits its files
    key = group, name, tuple(folders), changes
    if key not in _COMPOSED:
        _COMPOSED[key] = _composed(group, name, tuple(folders))
    return deepcopy(_COMPOSED[key])


def read_all(group: str) -> dict[str, Config]:
    """`read` for every file of conf/<group>/, several in one composition: each takes Hydra 50 ms, however small it is.

    A composition merges each of its files into all before it, so that one of every file would take longer.
    """
    from hydra import compose
    from omegaconf import OmegaConf

    new = [name for name in names(group) if (group, name, (), ()) not in _COMPOSED]
    for some in (new[start : start + TOGETHER] for start in range(0, len(new), TOGETHER)):
        words = [f"+{group}@{group}.file_{number}={json.dumps(name)}" for number, name in enumerate(some)]
        with _own_hydra(()):
            found: Any = OmegaConf.to_container(compose(overrides=words))
        _COMPOSED.update({(group, name, (), ()): found[group][f"file_{number}"] for number, name in enumerate(some)})
    return {name: read(group, name) for name in names(group)}


def _composed(group: str, name: str, folders: tuple[Path, ...]) -> Config:
    from hydra import compose
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    path = ",".join(json.dumps(f"file://{folder.resolve()}") for folder in folders)
    try:
        with _own_hydra(folders):
            config = compose(overrides=[f"+{group}={json.dumps(name)}", *[f"hydra.searchpath=[{path}]"] * bool(path)])
        found: Any = OmegaConf.to_container(config)[group]  # type: ignore[call-overload, index]
        if not isinstance(found, dict):
            raise UsageError(f"{find(group, name, folders)} cannot be read: it must hold fields, such as _target_")
        return found
    except (HydraException, OmegaConfBaseException, OSError) as error:
        raise UsageError(in_one_line(find(group, name, folders), error)) from error


@contextmanager
def _own_hydra(folders: tuple[Path, ...]) -> Iterator[None]:
    """A Hydra context of kvbench's configurations; afterwards that of the calling application is back."""
    from hydra import initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.utils import JobRuntime
    from hydra.version import VersionBase

    with _LOCK:
        instance, base = GlobalHydra.instance(), VersionBase.instance().getbase()
        job = JobRuntime.instance()
        name = job.get("name")
        others, instance.hydra = instance.hydra, None
        token = OWN_FOLDERS.set(folders)
        try:
            with initialize_config_module("kvbench.conf", job_name="kvbench", version_base="1.3"):
                yield
        finally:
            OWN_FOLDERS.reset(token)
            GlobalHydra.set_instance(instance)
            instance.hydra = others
            VersionBase.instance().version_base = base
            job.set("name", name)


def resolved(config: Mapping[str, Any]) -> Config:
    """A whole configuration, such as {"policy": ..., "budget": ...}, with the values of its interpolations."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if "${" not in repr(config):
        return dict(config)
    try:
        made: Any = OmegaConf.to_container(OmegaConf.create(dict(config), flags={"allow_objects": True}), resolve=True)
        return dict(made)
    except OmegaConfBaseException as error:
        raise UsageError(f"{error.full_key}: {first_line(error)}") from error


def check_settings(file: Path) -> None:
    """Raise ConfigError for settings of Hydra in a file of the user that kvbench does not follow."""
    own = load(file)
    entries = [entry for entry in own.get("defaults", ()) if isinstance(entry, dict)]
    chosen = [(str(key).rpartition(" ")[2].strip("/"), value) for entry in entries for key, value in entry.items()]
    for key, value in (*chosen, *_leaves("hydra", own.get("hydra"))):
        refuse_unused(key, str(value), f"{file}: ")


def _leaves(path: str, node: object) -> list[tuple[str, object]]:
    if not isinstance(node, dict):
        return [(path, node)]
    return [leaf for key, value in node.items() for leaf in _leaves(f"{path}.{key}", value)]


def refuse_unused(key: str, value: str, where: str = "") -> None:
    """Raise ConfigError for a setting with which Hydra would leave empty folders and files beside those in `out`."""
    why = ""
    if key in ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.output_subdir"):
        why = "has no effect: results are in the folder out=, with their configurations"
    elif key == "hydra.verbose" and value.lower() != "false":
        why = "has no effect: messages are the same in all runs; HYDRA_FULL_ERROR=1 shows where an error occurred"
    elif key == "hydra.job.chdir" and value.lower() != "false":
        why = "has no effect: relative paths belong to the folder of the command"
    elif key in ("hydra/job_logging", "hydra/hydra_logging") and value not in ("none", "disabled", "stdout"):
        why = "would write an empty log file (allowed: none, disabled, stdout)"
    if why:
        raise ConfigError(f"{where}{key}", value, why=why)


def check_file(group: str, name: str, folders: Sequence[Path] = (), above: tuple[Path, ...] = ()) -> None:
    """Raise UsageError for a file of the user that is not YAML or is in its own defaults. above: those around it."""
    file = find(group, name, folders)
    if file is None or file.is_relative_to(CONF):
        return
    if file in above:
        raise UsageError(f"{file} cannot be read: its defaults contain itself")
    for entry in load(file).get("defaults", ()):
        for key, values in entry.items() if isinstance(entry, dict) else [("", entry)]:
            place = str(key).rpartition(" ")[2].partition("@")[0]  # without override, optional and the package
            for value in values if isinstance(values, list) else [values]:
                path = f"{place}/{value}" if place else str(value)  # absolute, or beside this file
                path = path if path.startswith("/") else f"{f'{group}/{name}'.rpartition('/')[0]}/{path}"
                inner, _, other = path.removeprefix("/").rpartition("/")
                check_file(inner, other, folders, (*above, file))


def in_one_line(file: Path | None, error: Exception) -> str:
    """What is wrong with a file, without the lines that Hydra and YAML add."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        line, column = error.problem_mark.line + 1, error.problem_mark.column + 1
        hint = " (a tab?)" if "cannot start any token" in str(error.problem) else ""
        return f"{file} cannot be read: line {line}, column {column}: {error.problem}{hint}"
    text = " ".join(str(error).partition("\nConfig search path")[0].split())
    return text if "cannot be read" in text else f"{file} cannot be read: {text}"


def load(file: Path) -> Config:
    """The contents of one file. Raises UsageError if it is not a mapping in YAML."""
    try:
        own = yaml.load(file.read_text(encoding="utf-8-sig"), _LOADER)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(in_one_line(file, error)) from error
    own = {} if own is None else own
    if not isinstance(own, dict) or not isinstance(own.get("defaults", []), list):
        raise UsageError(f"{file} cannot be read: it must hold fields, such as _target_, or a list of defaults")
    return own


def check_run_fields(words: Mapping[str, Any], groups: Sequence[str] = ()) -> None:
    """Raise ConfigError for a word that is not a field of a run, nor of Hydra. groups: other names that are allowed."""
    own = {key: fields for key, fields in load(CONF / "config.yaml").items() if key != "defaults"}
    known = ["model", "policy", "task", "logger", *groups, *own]
    for key, value in words.items():
        name, *inner = re.split("[./@]", key)
        if name not in known:
            why = f"is not a field of a run{instead(name, known, command='--help', noun='field')}"
            raise ConfigError(key, value, why=why)
        fields = own.get(name)
        if inner and isinstance(fields, dict) and name != "hydra" and inner[0] not in fields:
            raise ConfigError(key, value, why=f"is not a field of {name}{instead(inner[0], list(fields))}")


def merge(config: Config, other: Mapping[str, Any]) -> Config:
    """Merge `other` into `config`, field by field; returns `config`."""
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(config.get(key), dict):
            merge(config[key], value)
        else:
            config[key] = value
    return config
