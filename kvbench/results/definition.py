"""`sweep.yaml`: every run of a sweep, including runs that were never started."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from kvbench.errors import UsageError
from kvbench.results.files import read_yaml, remove_torn, write_atomically, yaml_text
from kvbench.results.locks import held

FILE_NAME = "sweep.yaml"
SWEEP_FOLDER = ".sweep"
"""The folder of job logs and states of runs."""
_HEAD = "# The runs of this folder's sweeps: `python -m kvbench.sweep status FOLDER` shows their progress.\n"


@dataclass(frozen=True)
class Entry:
    """One run of a sweep. config: the resolved configuration. error: why it cannot run."""

    title: str  # the overrides that differ between runs: "policy=snapkv budget=64"
    model: str  # names of presets
    policy: str
    task: str
    limit: int | None
    config: dict[str, Any]
    run_id: str | None = None  # None if the run has an error
    changed: tuple[str, ...] = ()  # fields of the identity that differ from the presets
    identity: dict[str, Any] | None = None
    error: str | None = None

    @property
    def key(self) -> str:
        """The key of the run within the sweep."""
        return self.run_id or self.title

    @property
    def budget(self) -> int | float | str | None:
        """The configured budget; None for a policy without one."""
        budget: int | float | str | None = (self.identity or self.config)["budget"]
        return budget

    @property
    def group(self) -> str:
        """The same text for runs that share prefills: model, task, and the settings of the task."""
        identity = self.identity or {}
        return json.dumps([identity.get(name) for name in ("model", "dtype", "task", "compress", "seed", "generation")])


@dataclass(frozen=True)
class Definition:
    """The runs of all sweeps with the same output folder.

    folder: the working directory of the last command; paths are relative to it. launcher: its launcher's fields.
    """

    name: str
    commands: tuple[str, ...] = ()
    folder: str = "."
    launcher: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    runs: tuple[Entry, ...] = ()

    def joined(self, later: Definition) -> Definition:
        """The union of this sweep and a later one with the same output folder.

        A run with the same configuration but another id, after a change of code or weights, replaces the older one.
        """
        keys = {entry.key for entry in later.runs}
        words = {json.dumps(entry.config, sort_keys=True) for entry in later.runs}
        kept = (e for e in self.runs if e.key not in keys and json.dumps(e.config, sort_keys=True) not in words)
        commands = tuple(dict.fromkeys((*self.commands, *later.commands)))
        return replace(later, commands=commands, runs=(*kept, *later.runs))


def write_definition(folder: Path, definition: Definition) -> Definition:
    """Merge a sweep with the stored one, write and return the result. Raises OSError."""
    private = folder / SWEEP_FOLDER
    private.mkdir(parents=True, exist_ok=True)
    with held(private, wait=True):  # concurrent commands must not lose each other's runs
        remove_torn(folder)
        if (folder / FILE_NAME).exists():
            definition = read_definition(folder).joined(definition)
        known: dict[str, Any] = {}
        runs = [_values(entry, known) for entry in definition.runs]
        text = yaml_text({**vars(definition), "commands": list(definition.commands), "runs": runs})
        write_atomically(folder / FILE_NAME, _HEAD + text)
    return definition


def read_definition(folder: Path) -> Definition:
    """The sweep in a folder. Raises UsageError if it is missing or cannot be read."""
    path = folder / FILE_NAME
    try:
        values = read_yaml(path)
        runs = tuple(map(_entry, values.pop("runs" if "runs" in values else "cells")))  # cells: of old versions
        return Definition(**{**values, "commands": tuple(values["commands"])}, runs=runs)
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{folder} holds no sweep: there is no {FILE_NAME}") from None
    except (OSError, yaml.YAMLError, TypeError, KeyError, AttributeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"{path} cannot be read: {reason}") from error


def _entry(run: dict[str, Any]) -> Entry:
    known = {f.name for f in fields(Entry)}
    values: dict[str, Any] = {key: value for key, value in run.items() if key in known}
    return Entry(**{**values, "changed": tuple(values["changed"])} if "changed" in values else values)


def sweep_name(out: Path, experiment: str | None) -> str:
    """The name of a sweep: its experiment or output folder, with characters that a job name may have."""
    return re.sub(r"[^\w.-]+", "_", experiment or out.resolve().name) or "sweep"


def _values(entry: Entry, known: dict[str, Any]) -> dict[str, Any]:
    """An entry as plain data. Equal mappings become one object, which YAML writes once."""
    values = {f.name: getattr(entry, f.name) for f in fields(entry)}
    for name in ("config", "identity"):
        tree = values[name]
        values[name] = None if tree is None else {key: _shared(value, known) for key, value in tree.items()}
    return {**values, "changed": list(entry.changed)}


def _shared(value: Any, known: dict[str, Any]) -> Any:  # noqa: ANN401 - whatever YAML holds
    return known.setdefault(json.dumps(value, sort_keys=True), value) if isinstance(value, dict) else value
