"""What lies beside a run's samples, checked on reading: config.yaml and environment.json, which people edit and cut."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from kvbench.records.files import read_yaml
from kvbench.terminal.errors import UsageError

CONFIG: Mapping[str, Any] = {
    "run_id": str,
    "names": {"policy": str, "model": str, "task": str},
    "identity": {"model": dict, "policy": dict, "budget": object, "task": dict},
}
ENVIRONMENT: Mapping[str, Any] = {"hardware": dict}
"""What the reader of a run relies on: names, and of what kind their values are."""


def read_config(folder: Path) -> dict[str, Any]:
    """config.yaml of a run. Raises UsageError, naming the field, where it does not say what every run's does."""
    return _read(folder / "config.yaml", read_yaml, CONFIG)


def read_environment(folder: Path) -> dict[str, Any]:
    """environment.json of a run. Raises UsageError likewise."""
    return _read(folder / "environment.json", lambda path: json.loads(path.read_text(encoding="utf-8")), ENVIRONMENT)


def _read(path: Path, read: Callable[[Path], Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    try:
        found: dict[str, Any] = read(path)
        wrong = _problem(found, wanted, "")
    except OSError as error:
        wrong = (error.strerror or str(error)).lower()
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        wrong = " ".join(str(error).split())
    if wrong:
        raise UsageError(f"{path.parent} is not a readable run ({path.name}: {wrong})")
    return found


def _problem(found: object, wanted: Mapping[str, Any], place: str) -> str:
    """The first thing that is not as wanted; empty where all is."""
    if not isinstance(found, Mapping):
        return f"{place.rstrip('.') or 'it'} has no fields"
    for name, kind in wanted.items():
        if name not in found:
            return f"there is no {place}{name}"
        if isinstance(kind, Mapping):
            wrong = _problem(found[name], kind, f"{place}{name}.")
            if wrong:
                return wrong
        elif not isinstance(found[name], kind):
            return f"{place}{name} is {found[name]!r:.60}"
    return ""
