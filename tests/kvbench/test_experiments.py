"""`experiment=<paper>/<table>`: its grids hold every run that a number of the table needs."""

from itertools import product
from typing import Any

import pytest

from kvbench.config.compose import CONF, load, names
from kvbench.papers import published
from kvbench.papers.layout import numbers, tables
from kvbench.papers.protocol import runs_of

TABLES = sorted(name for name in names("experiment") if name.partition("/")[0] in published.papers())
SWEPT = ("model", "policy", "budget", "task")


def runs_in(name: str) -> list[tuple[Any, ...]]:
    """The runs of all grids: model, policy, budget, task and the sorted further fields."""
    config = load(CONF / "experiment" / f"{name}.yaml")
    found = []
    for grid in config["hydra"]["sweeper"]["grids"] if "hydra" in config else config["sweeps"]:
        grid = {**dict.fromkeys(SWEPT), **grid}
        for values in product(*(of if isinstance(of, list) else [of] for of in grid.values())):
            run = dict(zip(grid, values, strict=True))
            point = [run.pop(key) for key in SWEPT]
            found.append((*point, *sorted(f"{key}={value}" for key, value in run.items())))
    return found


def test_every_table_has_an_experiment_or_cannot_be_run() -> None:
    assert [name for name in sorted(tables()) if any(True for n in numbers(name) for _ in runs_of(n))] == TABLES


@pytest.mark.parametrize("name", TABLES)
def test_the_grids_hold_every_run_of_the_table_once(name: str) -> None:
    """They may hold more: numbers that the text of the paper has lost."""
    runs = runs_in(name)
    assert len({*runs}) == len(runs)
    planned = {
        (one.model, one.policy, one.budget, one.task, *sorted(f"{k}={v}" for k, v in one.settings.items()))
        for number in numbers(name)
        for one in runs_of(number)
    }
    assert planned <= {*runs}
