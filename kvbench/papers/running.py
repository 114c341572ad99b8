"""`python -m kvbench.tables run`: the runs behind what is asked of a table, and then the table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvbench.analysis.load import load_results
from kvbench.analysis.result import Result
from kvbench.config.overrides import check
from kvbench.identity.cell import out_folder
from kvbench.papers import arrangement
from kvbench.papers.choice import POCKET, Choice
from kvbench.papers.compare import compare
from kvbench.papers.pocket_table import pocket_runs, pocket_table
from kvbench.papers.protocol import Plan, refused
from kvbench.papers.sweeps import in_sweeps, planned_runs
from kvbench.records.definition import sweep_name
from kvbench.report.grid import Grid
from kvbench.sweeps.launcher import defined, make_launcher
from kvbench.sweeps.plan import plan
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


def run_table(name: str, choice: Choice, said: str) -> int | None:
    """See to it that what is missing of the runs behind a table is computed, as one sweep, where `launcher=` says.

    said: the command line, which the sweep keeps. Returns the exit code; None where jobs were submitted that nobody
    waits for. What is wrong with a run is said, each reason once; UsageError where it is so with all of them.
    """
    config = check(choice.launcher).first.config["launcher"]
    launcher = make_launcher(config)
    fields = {"out": OUT, **choice.run}
    lines = [
        [*sweep.words, *(f"{key}={value}" for key, value in fields.items())]
        for sweep in in_sweeps(planned(name, choice))
    ]
    cells = plan([cell for line in lines for cell in check(line).cells], elsewhere=launcher.elsewhere)
    if not any(one.cell for one in cells):
        raise UsageError(f"not one of the {len(cells)} runs behind {name} can be made")
    out = out_folder(fields["out"])
    code = launcher.launch(defined(out, cells, sweep_name(out, name), said, config, shows=False))
    return None if launcher.elsewhere and not config["wait"] else code


def table(name: str, choice: Choice, runs: Sequence[Result]) -> Grid:
    """What is asked of a table: on the pocket model its own numbers, else ours beside the print."""
    return pocket_table(name, choice, runs) if choice.scale == POCKET else compare(name, runs, choice)


def finished(choice: Choice) -> Sequence[Result]:
    """The finished runs in the folder that the runs of a table go to."""
    return load_results(Path(choice.run.get("out", OUT)))
