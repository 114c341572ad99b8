"""Published numbers of papers: `results/paper/<paper>/<table>.csv`, one number per row, as printed.

Numbers are never computed or corrected: a wrong printed average stays, with a note. Numbers that are missing in the
text of a paper are missing here. `results/paper/<paper>/README.md` lists omissions and their reasons.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from kvbench.errors import unknown
from kvbench.results.labels import natural

COLUMNS = ("paper", "table", "model", "method", "budget", "budget_kind", "task", "metric", "value", "note")
FOLDER = Path(str(resources.files("kvbench.papers") / "data"))
BASELINE = "full"
AVERAGE = "avg"


@dataclass(frozen=True)
class Number:
    """One published number and its place in the table; the fields except value and note identify it.

    budget: tokens per KV head and layer on average (`tokens_per_head`), share of the prompt or of the cache's bytes
    that is kept (`ratio`), bit width (`bits`), or None for the full cache and if the paper names none. printed: the
    digits of value in the paper.
    """

    paper: str
    table: str
    model: str
    method: str
    budget: int | float | None
    budget_kind: str
    task: str
    metric: str
    value: float
    note: str
    printed: str

    @property
    def name(self) -> str:
        """The name of its table: `caote/table2`."""
        return f"{self.paper}/{self.table}"


@cache
def papers() -> tuple[str, ...]:
    """The papers that have tables, sorted."""
    return tuple(sorted({path.parent.name for path in FOLDER.glob("*/*.csv")}))


@cache
def tables(paper: str | None = None) -> tuple[str, ...]:
    """Names (`caote/table2`) of all tables, or of one paper, in natural order: table2 before table10."""
    if paper is None:
        return tuple(name for paper in papers() for name in tables(paper))
    if paper not in papers():
        raise unknown("paper", paper, papers())
    return tuple(f"{paper}/{stem}" for stem in sorted((p.stem for p in (FOLDER / paper).glob("*.csv")), key=natural))


@cache
def read_table(name: str) -> tuple[Number, ...]:
    """The numbers of a table such as `caote/table2`, in the order of its file.

    Raises UsageError for an unknown table, with the nearest names.
    """
    if name not in tables():
        raise unknown("table", name, tables())
    with (FOLDER / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return tuple(_number(row) for row in csv.DictReader(file))


def _number(row: dict[str, str]) -> Number:
    printed, budget = row.pop("value"), row.pop("budget")
    kind = int if row["budget_kind"] == "tokens_per_head" else float
    return Number(**row, value=float(printed), printed=printed, budget=kind(budget) if budget else None)
