"""The numbers the papers print: `results/paper/<paper>/<table>.csv`, one number a row, as printed.

Facts, never computed or mended: a printed average that does not add up stays, with a note; what the text of a paper has
lost is not there. `results/paper/<paper>/README.md` says what was left out and why.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from math import isfinite
from pathlib import Path

from kvbench.terminal.close import close_names
from kvbench.terminal.errors import UsageError

COLUMNS = ("paper", "table", "model", "method", "budget", "budget_kind", "task", "metric", "value", "note")
BUDGET_KINDS = ("", "tokens_per_head", "ratio", "bits")
BASELINE = "full"
AVERAGE = "avg"


@dataclass(frozen=True)
class Number:
    """One published number and where it stands.

    budget: tokens per KV head and layer on average (`tokens_per_head`), share of the prompt or of the cache's
    bytes that is kept (`ratio`), code width (`bits`), or None for the full cache and where the paper names none.
    value is the number, printed its digits as the paper has them. line: of the CSV, from 1, the header being line 1.
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
    line: int

    @property
    def name(self) -> str:
        """Of its table: `caote/table2`."""
        return f"{self.paper}/{self.table}"

    @property
    def cell(self) -> tuple[str, str, int | float | None, str, str, str]:
        """What it is about; no two numbers of a table share it: (model, method, budget, kind, task, metric)."""
        return self.model, self.method, self.budget, self.budget_kind, self.task, self.metric

    @property
    def setting(self) -> tuple[str, str, int | float | None, str]:
        """(model, method, budget, kind): one run per task."""
        return self.model, self.method, self.budget, self.budget_kind


def folder() -> Path:
    """Where the published tables lie. Raises UsageError where this installation has none."""
    path = Path(str(resources.files("kvbench.papers") / "data"))
    if not path.is_dir():
        raise UsageError(f"the published tables are not installed: {path} is missing (a checkout has results/paper)")
    return path


@cache
def papers() -> tuple[str, ...]:
    """The papers that have tables, sorted."""
    return tuple(sorted(path.name for path in folder().iterdir() if path.is_dir() and any(path.glob("*.csv"))))


@cache
def tables(paper: str | None = None) -> tuple[str, ...]:
    """Names (`caote/table2`) of all tables, or of one paper's, as a reader counts: table2 before table10."""
    if paper is None:
        return tuple(name for paper in papers() for name in tables(paper))
    if paper not in papers():
        raise UsageError(f"paper {paper!r} has no published tables here{_meant(paper, papers())}")
    return tuple(f"{paper}/{stem}" for stem in sorted((p.stem for p in (folder() / paper).glob("*.csv")), key=_natural))


@cache
def read_table(name: str) -> tuple[Number, ...]:
    """The numbers of a table such as `caote/table2`, in the order of its file.

    Raises UsageError for an unknown table, with close names, and ValueError where its file breaks a rule.
    """
    if name not in tables():
        raise UsageError(f"table {name!r} is unknown{_meant(name, tables())} (`list` shows them all)")
    return read_csv(folder() / f"{name}.csv")


def all_numbers() -> tuple[Number, ...]:
    """Every published number of every table."""
    return tuple(number for name in tables() for number in read_table(name))


def read_csv(path: Path) -> tuple[Number, ...]:
    """The numbers of `<paper>/<table>.csv`. Raises ValueError, naming file and line, where one breaks a rule."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    if not rows or tuple(rows[0]) != COLUMNS:
        raise ValueError(f"{path}: the first line must be {','.join(COLUMNS)}")
    numbers = tuple(_number(path, line, row) for line, row in enumerate(rows[1:], start=2))
    _refuse_repeats(path, numbers)
    return numbers


def _refuse_repeats(path: Path, numbers: tuple[Number, ...]) -> None:
    first: dict[object, Number] = {}
    for number in numbers:
        other = first.setdefault(number.cell, number)
        if other is not number:
            raise ValueError(f"{path}: lines {other.line} and {number.line} are about the same cell")


def _number(path: Path, line: int, row: list[str]) -> Number:
    where = f"{path}:{line}"
    if len(row) != len(COLUMNS):
        raise ValueError(f"{where}: {len(COLUMNS)} fields are needed, found {len(row)}")
    fields = dict(zip(COLUMNS, row, strict=True))
    if (fields["paper"], fields["table"]) != (path.parent.name, path.stem):
        raise ValueError(f"{where}: paper and table must be {path.parent.name} and {path.stem}, as the file is called")
    for name in ("method", "task", "metric"):
        if not fields[name]:
            raise ValueError(f"{where}: {name} is empty")
    printed, budget = fields.pop("value"), fields.pop("budget")
    return Number(
        **fields, value=_value(where, printed), printed=printed, budget=_budget(where, budget, fields), line=line
    )


def _value(where: str, printed: str) -> float:
    try:
        value = float(printed)
    except ValueError:
        value = float("nan")
    if not isfinite(value):
        raise ValueError(f"{where}: value must be a number, got {printed!r}")
    return value


def _budget(where: str, text: str, fields: dict[str, str]) -> int | float | None:
    kind = fields["budget_kind"]
    if kind not in BUDGET_KINDS:
        raise ValueError(f"{where}: budget_kind must be one of {', '.join(BUDGET_KINDS[1:])} or empty, got {kind!r}")
    if bool(text) != bool(kind) or (text and fields["method"] == BASELINE):
        raise ValueError(f"{where}: budget and budget_kind stand together, and not for {BASELINE}: {text!r}, {kind!r}")
    if not text:
        return None
    budget = _value(where, text)
    if budget <= 0 or (kind == "ratio" and budget >= 1) or (kind == "tokens_per_head" and budget % 1):
        raise ValueError(f"{where}: budget {text} is no {kind}")
    return int(budget) if kind == "tokens_per_head" else budget


def _meant(name: str, allowed: tuple[str, ...]) -> str:
    close = close_names(name, allowed)
    return f", did you mean {' or '.join(close)}?" if close else f" (there are {', '.join(papers())})"


def _natural(stem: str) -> tuple[tuple[int, str], ...]:
    """Sorts words by letters and numbers by size: table2 before table10."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", stem) if part)
