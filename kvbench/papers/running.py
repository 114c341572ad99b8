"""`python -m kvbench.tables run`: the runs behind what is asked of a table, and then the table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvbench.analysis.load import load_results
from kvbench.analysis.result import Result
from kvbench.papers import arrangement
from kvbench.papers.choice import POCKET, Choice
from kvbench.papers.compare import compare
from kvbench.papers.pocket_table import pocket_runs, pocket_table
from kvbench.papers.protocol import Plan, refused
from kvbench.papers.sweeps import in_sweeps, planned_runs
from kvbench.report.grid import Grid
from kvbench.sweeps.app import grids_override, main
from kvbench.terminal.errors import UsageError

OUT = "results/runs"


def planned(name: str, choice: Choice) -> list[Plan]:
    """The runs behind what is asked of a table, each once. Raises UsageError where there are none."""
    numbers = arrangement.numbers(name)
    reasons = refused(numbers)
    if len(numbers) == sum(map(len, reasons.values())):
        raise UsageError(f"{name} cannot be run: {'; '.join(reasons)}")
    if choice.scale == POCKET:
        return pocket_runs(name, choice)
    found = planned_runs(choice.numbers(name))
    if not found:
        raise UsageError(f"nothing of what is asked of {name} can be run: `compare {name}` says why")
    return found


def run_table(name: str, choice: Choice) -> int | None:
    """Compute or submit what is missing of the runs behind a table, as one sweep.

    Returns the exit code; None if jobs were submitted and are not waited for.
    """
    fields = [f"{key}={value}" for key, value in {"out": OUT, **choice.run}.items()]
    grids = grids_override([sweep.grid for sweep in in_sweeps(planned(name, choice))])
    code = main(["-m", *fields, *choice.launcher, grids])
    submitted = any(word.startswith("hydra/launcher=slurm") for word in choice.launcher)
    return None if submitted and "hydra.launcher.wait=true" not in choice.launcher and not code else code


def table(name: str, choice: Choice, runs: Sequence[Result]) -> Grid:
    """What is asked of a table: on the pocket model its own numbers, else ours beside the print."""
    return pocket_table(name, choice, runs) if choice.scale == POCKET else compare(name, runs, choice)


def finished(choice: Choice) -> Sequence[Result]:
    """The finished runs in the folder that the runs of a table go to."""
    return load_results(Path(choice.run.get("out", OUT)))
