"""What of a table is asked for: `models=... budgets=... methods=... tasks=...`, and how it is run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvbench.papers.layout import budget_text
from kvbench.papers.lost import printed_cells
from kvbench.papers.protocol import runs_of
from kvbench.papers.published import Number
from kvbench.terminal.command import pairs
from kvbench.terminal.errors import ConfigError, UsageError

FULL, POCKET = "full", "pocket"
SCALES = (FULL, POCKET)
SELECTED = ("models", "methods", "budgets", "tasks")
RUN = ("limit", "out", "device", "dtype", "seed", "allow_mixed")
"""Fields of `python -m kvbench` that hold for every run of a table."""


def names_of(number: Number) -> dict[str, set[str]]:
    """How a number is called in each of `SELECTED`: as in the paper's CSV, and as `python -m kvbench` calls it."""
    runs = list(runs_of(number))
    return {
        "models": {number.model, *(one.model for one in runs)},
        "methods": {number.method, *(one.policy for one in runs)},
        "budgets": set() if number.budget is None else {str(number.budget), budget_text(number)},
        "tasks": {number.task, *(one.task for one in runs)},
    }


@dataclass(frozen=True)
class Choice:
    """The selection: values of `SELECTED`, fields of `RUN`, and the scale: the paper's or the pocket model's.

    launcher: `hydra/launcher=slurm` and its fields, as they were given.
    """

    wanted: dict[str, tuple[str, ...]] = field(default_factory=dict)
    run: dict[str, str] = field(default_factory=dict)
    scale: str = FULL
    launcher: tuple[str, ...] = ()

    def numbers(self, name: str) -> tuple[Number, ...]:
        """The numbers of a table that are asked for, lost ones as well, in the order of the print.

        The full cache has no budget and stays whatever budgets are asked for. Raises UsageError for a value that no
        number of the table has, and where nothing is left.
        """
        found = {number: names_of(number) for number in printed_cells(name)}
        for key, values in self.wanted.items():
            known = set().union(*(called[key] for called in found.values()))
            for value in values:
                if value not in known:
                    raise UsageError(f"{key}={value} is not in {name} (allowed: {', '.join(sorted(known))})")
        chosen = tuple(number for number, called in found.items() if self._has(called))
        if not chosen:
            asked = " ".join(f"{key}={','.join(values)}" for key, values in self.wanted.items())
            raise UsageError(f"{asked} leaves no number of {name}")
        return chosen

    def _has(self, called: dict[str, set[str]]) -> bool:
        return all(
            called[key] & {*values} or (key == "budgets" and not called[key]) for key, values in self.wanted.items()
        )


def read_choice(given: Sequence[str]) -> Choice:
    """What `key=value` pairs say. Raises UsageError for another key, a missing value, or a scale that is not there."""
    asked = pairs(given, "methods=snapkv,caote_snapkv")
    for key, value in asked.items():
        if not value:
            raise UsageError(f"{key}= cannot be read: write key=value, such as methods=snapkv,caote_snapkv")
        if key not in (*SELECTED, *RUN, "scale") and not key.startswith("hydra"):
            known = (*SELECTED, *RUN, "scale", "hydra/launcher")
            raise UsageError(f"{key}={value} is no selection of a table (allowed: {', '.join(known)})")
    limit = asked.get("limit", "null")
    if limit != "null" and not (limit.isdecimal() and int(limit)):
        raise ConfigError("limit", limit, "a whole number of at least 1")
    scale = asked.get("scale", FULL)
    if scale not in SCALES:
        raise UsageError(f"scale={scale} is unknown (allowed: {', '.join(SCALES)})")
    return Choice(
        wanted={key: tuple(value.split(",")) for key, value in asked.items() if key in SELECTED},
        run={key: value for key, value in asked.items() if key in RUN},
        scale=scale,
        launcher=tuple(f"{key}={value}" for key, value in asked.items() if key.startswith("hydra")),
    )
