"""`sweep.yaml`, the definition of a sweep: every cell, also those that never started."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from kvbench.records.files import read_yaml, remove_torn, write_atomically, yaml_text
from kvbench.records.locks import held
from kvbench.terminal.errors import UsageError

FILE_NAME = "sweep.yaml"
SWEEP_FOLDER = ".sweep"
"""Beside it: shares, jobs, logs and states."""
_HEAD = "# The cells of this folder's sweep: `python -m kvbench.sweep status` on the folder says how far they are.\n"


@dataclass(frozen=True)
class Entry:
    """One cell of a sweep. config: as it was given, resolved. error: why it can never run, with its exit code."""

    title: str  # what tells it from the others: "policy=snapkv budget=64"
    model: str  # names chosen
    policy: str
    task: str
    limit: int | None
    config: dict[str, Any]
    run_id: str | None = None  # None where it has an error
    changed: tuple[str, ...] = ()  # fields of the identity that are not as the presets have them
    identity: dict[str, Any] | None = None
    error: str | None = None
    code: int = 0

    @property
    def key(self) -> str:
        """Its name within the sweep."""
        return self.run_id or self.title

    @property
    def budget(self) -> int | float | str | None:
        """As the command line says it, or, of a policy that has none, null."""
        budget: int | float | str | None = (self.identity or self.config)["budget"]
        return budget

    @property
    def group(self) -> str:
        """What cells must share to be computed from the same prefill: model, task and how it is read."""
        told = self.identity or {}
        return json.dumps([told.get(name) for name in ("model", "dtype", "task", "compress", "seed", "generation")])


@dataclass(frozen=True)
class Definition:
    """A sweep: its name, the command lines that made it, how it is launched, and its cells.

    folder: where the last command was given, from which the paths in the cells are read.
    """

    name: str
    commands: tuple[str, ...] = ()
    folder: str = "."
    launcher: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    cells: tuple[Entry, ...] = ()

    def joined(self, later: Definition) -> Definition:
        """This sweep with the cells of a later command into the same folder: the same cell is there once.

        So is one that was asked for in the same words, but has become another by a change of code or weights.
        """
        keys = {entry.key for entry in later.cells}
        words = {json.dumps(entry.config, sort_keys=True) for entry in later.cells}
        kept = (e for e in self.cells if e.key not in keys and json.dumps(e.config, sort_keys=True) not in words)
        cells = (*kept, *later.cells)
        commands = tuple(dict.fromkeys((*self.commands, *later.commands)))
        return replace(later, commands=commands, cells=cells)


def write_definition(folder: Path, definition: Definition) -> Definition:
    """Write a sweep into its folder, joined with the one that is there, and return the result. Raises OSError."""
    return _change(folder, lambda before: definition if before is None else before.joined(definition))


def drop_cells(folder: Path, keys: Collection[str]) -> None:
    """Remove these cells from the sweep. Raises OSError."""

    def without(before: Definition | None) -> Definition:
        assert before is not None
        return replace(before, cells=tuple(entry for entry in before.cells if entry.key not in keys))

    _change(folder, without)


def _change(folder: Path, change: Callable[[Definition | None], Definition]) -> Definition:
    private = folder / SWEEP_FOLDER
    private.mkdir(parents=True, exist_ok=True)
    with held(private):  # of two commands at once none must lose the other's cells
        remove_torn(folder)
        definition = change(read_definition(folder) if (folder / FILE_NAME).exists() else None)
        known: dict[str, Any] = {}
        cells = [_values(entry, known) for entry in definition.cells]
        text = yaml_text({**vars(definition), "commands": list(definition.commands), "cells": cells})
        write_atomically(folder / FILE_NAME, _HEAD + text)
    return definition


def read_definition(folder: Path) -> Definition:
    """The sweep in a folder. Raises UsageError where there is none that can be read."""
    path = folder / FILE_NAME
    try:
        values = read_yaml(path)
        cells = tuple(Entry(**{**cell, "changed": tuple(cell["changed"])}) for cell in values.pop("cells"))
        return Definition(**{**values, "commands": tuple(values["commands"])}, cells=cells)
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{folder} holds no sweep: there is no {FILE_NAME}") from None
    except (OSError, yaml.YAMLError, TypeError, KeyError, AttributeError, ValueError) as error:
        sentence = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"{path} cannot be read: {sentence}") from error


def sweep_name(out: Path, experiment: str | None) -> str:
    """What a sweep is called: its experiment, or the folder of its results; fit for a job's name."""
    return re.sub(r"[^\w.-]+", "_", experiment or out.resolve().name) or "sweep"


def _values(entry: Entry, known: dict[str, Any]) -> dict[str, Any]:
    """An entry as YAML holds it; trees that several cells have are one object, which is written once."""
    values = {f.name: getattr(entry, f.name) for f in fields(entry)}
    for name in ("config", "identity"):
        tree = values[name]
        values[name] = None if tree is None else {key: _shared(value, known) for key, value in tree.items()}
    return {**values, "changed": list(entry.changed)}


def _shared(value: Any, known: dict[str, Any]) -> Any:  # noqa: ANN401 - whatever YAML holds
    return known.setdefault(json.dumps(value, sort_keys=True), value) if isinstance(value, dict) else value


def entries_of(definition: Definition, keys: Sequence[str]) -> list[Entry]:
    """Some cells of a sweep by their keys, in that order. Raises UsageError for one it has not."""
    known = {entry.key: entry for entry in definition.cells}
    missing = [key for key in keys if key not in known]
    if missing:
        raise UsageError(f"{FILE_NAME} has no cell {missing[0]}")
    return [known[key] for key in keys]
