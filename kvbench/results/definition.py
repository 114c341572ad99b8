"""The files of a sweep: `sweep.yaml`, with every run, also those never started; and the state of each started run."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from uuid import uuid4

import yaml

from kvbench.errors import UsageError, counted, first_line
from kvbench.results.files import (
    fits,
    held,
    read_bytes,
    read_json,
    read_yaml,
    remove_torn,
    write_atomically,
    write_json,
    yaml_text,
)
from kvbench.results.samples import FILE_NAME as SAMPLES
from kvbench.results.samples import read_samples

FILE_NAME = "sweep.yaml"
SWEEP_FOLDER = ".sweep"
"""The folder of job logs and states of runs."""
_HEAD = "# The runs of this folder's sweeps: `kvbench sweep status FOLDER` shows their progress.\n"


@dataclass(frozen=True)
class Entry:
    """One run of a sweep. config: the resolved configuration. error: why it cannot run.

    limit, run_id, changed and identity are known once the configuration is checked.
    """

    title: str  # the overrides that other runs do not have: "policy=snapkv budget=64"
    model: str  # names of presets
    policy: str
    task: str
    limit: int | None
    config: dict[str, Any]
    run_id: str | None = None  # None if the run has an error
    changed: tuple[str, ...] = ()  # fields of the identity that differ from the presets
    identity: dict[str, Any] | None = None
    error: str | None = None
    folder: str = "."  # working directory of its command: paths of its configuration are relative to it
    modules: tuple[str, ...] = ()  # further folders with modules of the user: those beside --config-dir

    @contextmanager
    def working_folder(self) -> Iterator[None]:
        """Work in `folder`, where modules of the user are found. Raises UsageError if it is gone."""
        if not Path(self.folder).is_dir():
            raise UsageError(f"{self.title}: the folder of its command is gone: {self.folder}")
        added = [folder for folder in (self.folder, *self.modules) if folder not in sys.path]
        sys.path += added
        try:
            with chdir(self.folder):
                yield
        finally:
            for folder in added:
                sys.path.remove(folder)

    @property
    def key(self) -> str:
        """The key of the run within the sweep."""
        return self.run_id or self.title

    @property
    def names(self) -> dict[str, str]:
        """The names of the presets."""
        return {"model": self.model, "policy": self.policy, "task": self.task}

    @property
    def group(self) -> str:
        """The same text for runs that share prefills: model, task, and the settings of the task."""
        identity = self.identity or {}
        return json.dumps([identity.get(name) for name in ("model", "dtype", "task", "compress", "seed", "generation")])


@dataclass(frozen=True)
class Definition:
    """The runs of all sweeps with the same output folder. launcher: fields of the last command's launcher."""

    name: str
    commands: tuple[str, ...] = ()
    launcher: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    runs: tuple[Entry, ...] = ()

    def joined(self, later: Definition) -> Definition:
        """The union of this sweep and a later one with the same output folder.

        A run with the same configuration but another id, after a change of code or weights, replaces the older one.
        """
        keys = {entry.key for entry in later.runs}
        words = {_words(entry) for entry in later.runs}
        kept = (entry for entry in self.runs if entry.key not in keys and _words(entry) not in words)
        commands = tuple(dict.fromkeys((*self.commands, *later.commands)))
        return replace(later, commands=commands, runs=(*kept, *later.runs))


def _words(entry: Entry) -> str:
    return json.dumps([entry.folder, entry.config], sort_keys=True)


def write_definition(folder: Path, definition: Definition) -> Definition:
    """Merge a sweep with the stored one, write and return the result. Raises OSError."""
    private = folder / SWEEP_FOLDER
    private.mkdir(parents=True, exist_ok=True)
    private.chmod(0o700)  # scripts and logs of jobs may contain secrets, such as a token in hydra.launcher.setup
    with held(private, wait=True):  # concurrent commands must not lose each other's runs
        remove_torn(folder)
        if (folder / FILE_NAME).exists():
            definition = read_definition(folder).joined(definition)
        known: dict[str, Any] = {}
        runs = [_values(entry, known) for entry in definition.runs]
        text = yaml_text({**vars(definition), "commands": list(definition.commands), "runs": runs})
        write_atomically(folder / FILE_NAME, _HEAD + text, private=True)
    return definition


def read_definition(folder: Path) -> Definition:
    """The sweep in a folder. Raises UsageError if it is missing or cannot be read."""
    path = folder / FILE_NAME
    try:
        values = read_yaml(path)
        folder = values.pop("folder", ".")  # older sweeps have one for all runs
        runs = tuple(_entry({"folder": folder, **run}) for run in values.pop("runs"))
        return Definition(**{**values, "commands": tuple(values["commands"])}, runs=runs)
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{folder} holds no sweep: there is no {FILE_NAME}") from None
    except (OSError, yaml.YAMLError, TypeError, KeyError, AttributeError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {first_line(error)}") from error


def folder_identity(out: Path) -> str:
    """Random digits that a folder of runs gets once: two folders with equal runs are different sweeps for trackers."""
    path = out / SWEEP_FOLDER / "identity"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        with held(path.parent, wait=True):
            if not path.exists():  # of two processes, the first one decides
                write_atomically(path, uuid4().hex)
    return path.read_text(encoding="utf-8")


def sweep_name(out: Path, experiment: str | None) -> str:
    """The name of a sweep: its experiment or output folder, with characters that a job name may have."""
    return re.sub(r"[^\w.-]+", "_", experiment or out.resolve().name) or "sweep"


def _entry(values: dict[str, Any]) -> Entry:
    """The inverse of `_values`."""
    return Entry(**{**values, "changed": tuple(values["changed"]), "modules": tuple(values.get("modules", ()))})


def _values(entry: Entry, known: dict[str, Any]) -> dict[str, Any]:
    """An entry as plain data. Equal mappings become one object, which YAML writes once."""
    values: dict[str, Any] = {**vars(entry), "changed": list(entry.changed), "modules": list(entry.modules)}
    for name in ("config", "identity"):
        tree = values[name] or {}
        for key, value in tree.items():
            if isinstance(value, dict):
                tree = {**tree, key: known.setdefault(json.dumps(value, sort_keys=True), value)}
        values[name] = tree or None
    return values


@dataclass(frozen=True)
class RunState:
    """State that the last process of a run stored. total: number of examples under `limit`. error: why it stopped."""

    limit: int | None
    total: int | None = None
    error: str | None = None

    @property
    def in_task(self) -> int | None:
        """The number of examples of the run's task; None if it is unknown because of the limit."""
        return self.total if self.total is not None and (self.limit is None or self.total < self.limit) else None


def state_path(out: Path, run_id: str) -> Path:
    """The path of a run's state file."""
    return out / SWEEP_FOLDER / "cells" / f"{run_id}.json"


def write_state(out: Path, run_id: str, state: RunState) -> None:
    """Write the state of a run. Raises OSError."""
    state_path(out, run_id).parent.mkdir(parents=True, exist_ok=True)
    write_json(state_path(out, run_id), asdict(state))


def read_state(out: Path, run_id: str) -> RunState | None:
    """The state of a run; None if it was never started."""
    try:
        state = RunState(**read_json(state_path(out, run_id)))
        kinds = isinstance(state.limit, int | None), isinstance(state.total, int | None)
        return state if all(kinds) and isinstance(state.error, str | None) else None
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def examples(folder: Path) -> tuple[int, int]:
    """The number of examples of a summarized run, and how many of them failed; (0, 0) for an unfinished run.

    If there is one answer to each prompt, the samples are counted and not read. Raises ValueError if they are damaged.
    """
    try:
        numbers = read_json(folder / "metrics.json")
        summarized, failed = int(numbers["n"]), int(numbers["n_failed"])
        modified, now = (folder / "metrics.json").stat(), (folder / SAMPLES).stat()
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return 0, 0
    if lines(folder) == summarized and modified.st_mtime_ns >= now.st_mtime_ns:
        return summarized, failed
    n, failed = _counted(folder / SAMPLES, now.st_mtime_ns, now.st_size)  # several answers to a prompt, or interrupted
    return (n, failed) if n >= summarized else (0, 0)


def failed_examples(folder: Path) -> str | None:
    """The error message of a run with failed examples; None if all of its examples have scores."""
    n, failed = examples(folder)
    return f"{failed} of {counted(n, 'example')} failed, see {folder}" if failed else None


@lru_cache(maxsize=10_000)
def _counted(path: Path, modified: int, size: int) -> tuple[int, int]:
    """Numbers of samples and of failed samples in a file; cached until the file changes."""
    samples = read_samples(path)
    return len(samples), sum(sample.error is not None for sample in samples)


def lines(folder: Path) -> int:
    """The number of examples of a run on disk."""
    try:
        return read_bytes(folder / SAMPLES).count(b"\n")
    except OSError:
        return 0


def damaged_records(folder: Path) -> list[str]:
    """The files that describe a run and are missing or damaged, or describe another run."""
    return [name for name, check in _RECORDS.items() if not check(folder / name)]


def _is_config(path: Path) -> bool:
    try:
        config = read_yaml(path)
        whole = {"naming", "config"} <= config.keys() and isinstance(config["naming"], dict)
        return bool(whole and config["run_id"] == path.parent.name and fits(config["run_id"], config["identity"]))
    except (OSError, yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False


def is_environment(value: object) -> bool:
    """Whether a value of environment.json describes a machine and its software."""
    if not isinstance(value, dict) or not {"packages", "hardware", "python", "kvbench_revision"} <= value.keys():
        return False
    packages, hardware = value["packages"], value["hardware"]
    known = {"device_name", "processor", "torch_threads"}
    return isinstance(packages, dict) and isinstance(hardware, dict) and known <= hardware.keys()


def environments(path: Path) -> list[dict[str, Any]]:
    """The environments in which a run was computed so far; none if the file is missing or damaged."""
    try:
        first = read_json(path)
        found = [first, *first.pop("resumed", [])]
    except (FileNotFoundError, ValueError, TypeError, AttributeError, RecursionError):
        return []
    return found if all(map(is_environment, found)) else []


def _is_environment_file(path: Path) -> bool:
    try:
        return bool(environments(path))
    except OSError:
        return False


_RECORDS: dict[str, Callable[[Path], bool]] = {"config.yaml": _is_config, "environment.json": _is_environment_file}


def _begin(folder: Path) -> bool:
    """Whether the files that describe a run exist, and are not empty or filled with zeros after a power cut."""
    try:
        return all(read_bytes(folder / name)[:1] not in (b"", b"\0") for name in _RECORDS)
    except OSError:
        return False


def is_complete(out: Path, entry: Entry, state: RunState | None) -> bool:
    """Whether all examples of a run are on disk, as far as this is known without loading the task.

    state: as `read_state` reads it.
    """
    if entry.run_id is None:
        return False
    try:
        n, _ = examples(out / entry.run_id)
    except ValueError:
        return False
    if not n or (state is not None and state.error is not None) or not _begin(out / entry.run_id):
        return False
    in_task = None if state is None else state.in_task
    return (entry.limit is not None and n >= entry.limit) or (in_task is not None and n >= in_task)
