"""What of a table is asked for: `models=... budgets=... methods=... tasks=...`, and how it is run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvbench.config.choices import did_you_mean
from kvbench.papers.layout import budget_text
from kvbench.papers.lost import printed_cells
from kvbench.papers.protocol import runnable, runs_of
from kvbench.papers.published import Number
from kvbench.terminal.command import pairs
from kvbench.terminal.errors import UsageError

FULL, POCKET = "full", "pocket"
SCALES = (FULL, POCKET)
RUN = ("limit", "out", "device", "dtype", "seed", "allow_mixed")
"""Fields of `python -m kvbench` that hold for every run of a table."""


def _models(number: Number) -> set[str]:
    return {number.model, *(one.model for one in runs_of(number))}


def _methods(number: Number) -> set[str]:
    return {number.method, *(one.policy for one in runs_of(number))}


def _budgets(number: Number) -> set[str]:
    return {"" if number.budget is None else str(number.budget), budget_text(number)} - {""}


def _tasks(number: Number) -> set[str]:
    return {number.task, *(one.task for one in runs_of(number))}


NAMES: dict[str, Callable[[Number], set[str]]] = {
    "models": _models,
    "methods": _methods,
    "budgets": _budgets,
    "tasks": _tasks,
}
"""How a number is called in each field of a selection: as in the paper's CSV, and as `python -m kvbench` calls it."""


@dataclass(frozen=True)
class Choice:
    """What was asked for: values of `NAMES`, fields of `RUN`, and the scale: that of the paper or the pocket model.

    launcher: `launcher=slurm` and its fields, as they were given.
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
        found = printed_cells(name)
        for key, values in self.wanted.items():
            of = NAMES[key]
            known = {called for number in found for called in of(number)}
            for value in values:
                if value not in known:
                    raise UsageError(f"{key}={value} is not in {name}{did_you_mean(value, sorted(known))}")
        chosen = tuple(number for number in found if all(self._has(key, number) for key in self.wanted))
        if not chosen:
            asked = " ".join(f"{key}={','.join(values)}" for key, values in self.wanted.items())
            raise UsageError(f"{asked} leaves no number of {name}")
        return chosen

    def _has(self, key: str, number: Number) -> bool:
        called = NAMES[key](number)
        return bool(called & set(self.wanted[key])) or (key == "budgets" and not called)


def read_choice(given: Sequence[str]) -> Choice:
    """What `key=value` pairs say. Raises UsageError for another key, a missing value, or a scale that is not there."""
    wanted: dict[str, tuple[str, ...]] = {}
    run: dict[str, str] = {}
    launcher: list[str] = []
    scale = FULL
    for key, value in pairs(given, "methods=snapkv,caote_snapkv").items():
        if not value:
            raise UsageError(f"{key}= cannot be read: write key=value, such as methods=snapkv,caote_snapkv")
        if key in NAMES:
            wanted[key] = tuple(value.split(","))
        elif key in RUN:
            run[key] = _checked(key, value)
        elif key == "scale":
            if value not in SCALES:
                raise UsageError(f"scale={value} is unknown{did_you_mean(value, SCALES)}")
            scale = value
        elif key.partition(".")[0] == "launcher":
            launcher.append(f"{key}={value}")
        else:
            known = (*NAMES, *RUN, "scale", "launcher")
            raise UsageError(f"{key}={value} is no selection of a table{did_you_mean(key, known)}")
    return Choice(wanted, run, scale, tuple(launcher))


def _checked(key: str, value: str) -> str:
    """A field of `RUN`. UsageError for a count that is none: the others are checked where runs are built."""
    least = {"limit": 1, "seed": 0}.get(key)
    if least is not None and not (value.isdecimal() and int(value) >= least) and value != "null":
        raise UsageError(f"{key}={value} is not allowed, it must be a whole number of at least {least}")
    return value


def check_table(name: str) -> None:
    """Raise UsageError, with the reasons, for a table of which nothing can be run."""
    able, reasons = runnable(name)
    if not able:
        raise UsageError(f"{name} cannot be run: {'; '.join(reasons)}")
