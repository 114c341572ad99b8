"""What a leaderboard asks of its runs, read from its experiment: tasks, budgets, fields that are the same for all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvbench.config.overrides import check
from kvbench.config.sweeps import command_lines
from kvbench.config.tree import names
from kvbench.identity.cell import spelled_out
from kvbench.records.definition import read_definition, sweep_name
from kvbench.records.files import read_yaml
from kvbench.terminal.errors import UsageError

FILE_NAME = "submission.yaml"
FIXED = ("seed", "generation", "compress", "schedule", "block", "decode", "every", "protect")
"""Fields of a run that a leaderboard sets for all."""
_PLACE = ("data_dir", "path")
"""Fields that say where files lie on a machine, not what is in them."""


@dataclass(frozen=True)
class Asked:
    """What a leaderboard asks. fixed: values of `FIXED`; cells: (task, budget), a task as its fields in JSON."""

    name: str
    fixed: Mapping[str, Any]
    limit: int | None
    cells: frozenset[tuple[str, int | float]]

    @property
    def tasks(self) -> frozenset[str]:
        """Its tasks, each as its fields in JSON."""
        return frozenset(task for task, _ in self.cells)


@dataclass(frozen=True)
class Submission:
    """A folder of runs, the leaderboard it is for, and who ran it."""

    folder: Path
    experiment: str
    submitter: str

    @property
    def name(self) -> str:
        """Of its folder."""
        return self.folder.resolve().name


def asked(experiment: str) -> Asked:
    """What an experiment asks. Raises UsageError where there is none of that name."""
    (line,) = command_lines([f"experiment={experiment}", "policy=full"])
    configs = [cell.config for cell in check(line).cells]
    fixed = {name: configs[0][name] for name in FIXED}
    cells = frozenset((task_of(config), config["budget"]) for config in configs)
    return Asked(experiment, fixed, configs[0]["limit"], cells)


def task_of(config: Mapping[str, Any]) -> str:
    """The task of a run's configuration, told by all its fields but those that say where files lie."""
    return json.dumps(placeless(spelled_out(config["task"])), sort_keys=True)


def placeless(tree: Any) -> Any:  # noqa: ANN401 - whatever JSON holds
    """A tree without the fields that say where files lie, tuples as lists."""
    if isinstance(tree, Mapping):
        return {str(key): placeless(value) for key, value in tree.items() if key not in _PLACE}
    return [placeless(value) for value in tree] if isinstance(tree, list | tuple) else tree


def read_submission(folder: Path, experiment: str | None, submitter: str | None) -> Submission:
    """The submission in a folder: as the flags say, then its submission.yaml, then the sweep that made it.

    Raises UsageError where nothing says which leaderboard it is for.
    """
    try:
        told = read_yaml(folder / FILE_NAME) if (folder / FILE_NAME).exists() else {}
        named = {name: told.get(name) for name in ("experiment", "submitter")}
    except (OSError, yaml.YAMLError, AttributeError) as error:
        raise UsageError(f"{folder / FILE_NAME} cannot be read: {' '.join(str(error).split())}") from error
    boards = [name for name in names("experiment") if name.startswith("leaderboard/")]
    found = (
        experiment or named["experiment"] or next((b for b in boards if _swept(folder) == sweep_name(folder, b)), "")
    )
    if found not in boards:
        said = f"experiment={found} is no leaderboard" if found else "nothing says which leaderboard it is for"
        raise UsageError(f"{folder}: {said}, give --experiment one of {', '.join(boards)}")
    return Submission(folder, found, str(submitter or named["submitter"] or "not told"))


def _swept(folder: Path) -> str | None:
    try:
        return read_definition(folder).name
    except UsageError:
        return None
