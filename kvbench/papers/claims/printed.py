"""Where cells of claims come from: one method against another in print, a trend, arithmetic; or nothing is printed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvbench.papers.claims.claim import DIGITS, Cell, Evidence
from kvbench.papers.published import BASELINE, Number, read_table

EACH = "each"
AVERAGES = ("avg", "overall")  # how the names of tasks end that are means of others


@dataclass(frozen=True)
class Compared:
    """Gain of a method over its rivals in every cell (model, budget, task) of some tables where both are printed.

    versus: methods and their rivals; where a method has several at once it meets the best of them, or the `rank`-th
    best (rank 2: to be second is enough). tasks: names, or EACH for all but averages. lower: lower is better. relative:
    gains in percent of the rival. A gain supports from `least` up to `most`.
    """

    tables: Sequence[str]
    versus: Sequence[tuple[str, Sequence[str]]]
    tasks: str | Sequence[str] = ("avg",)
    models: Sequence[str] = ()
    budgets: Sequence[int | float] = ()
    metric: str | None = None
    lower: bool = False
    relative: bool = False
    least: float = 0.0
    most: float = float("inf")
    rank: int = 1
    measure: str = "points"

    @property
    def unit(self) -> str:
        return "%" if self.relative else self.measure

    def evidence(self) -> Evidence:
        gains = list(self.gains())
        cells = tuple(gain[1] for gain in gains if gain is not None)
        missing = "" if cells else f"none of {', '.join(self.tables)} prints both sides"
        return Evidence(cells, gains.count(None), missing)

    def gains(self) -> Iterator[tuple[Number, Cell] | None]:
        """The method's number and its cell, or None where a rival's number was lost."""
        for table in self.tables:
            numbers = read_table(table)
            printed = {number.method for number in numbers}
            for method, rivals in self.versus:
                if printed.isdisjoint(rivals):
                    continue
                chosen = [number for number in numbers if number.method == method and self._chosen(number)]
                for number in chosen:
                    others = [other for rival in rivals if (other := _beside(numbers, number, rival)) is not None]
                    complete = len(others) == len(rivals) or (len(rivals) > 1 and len(others) >= self.rank)
                    yield (number, self._cell(number, others)) if complete else None

    def _chosen(self, number: Number) -> bool:
        return (
            (not number.task.endswith(AVERAGES) if self.tasks == EACH else number.task in self.tasks)
            and (not self.models or number.model in self.models)
            and (not self.budgets or number.budget in self.budgets)
            and (self.metric is None or number.metric == self.metric)
        )

    def _cell(self, number: Number, others: list[Number]) -> Cell:
        best = sorted(others, key=lambda other: other.value, reverse=not self.lower)[self.rank - 1]
        gain = best.value - number.value if self.lower else number.value - best.value
        if self.relative:
            gain *= 100 / best.value
        sides = f"{_printed(number)}, {_printed(best)}"
        where = f"{number.table} {label(number)}: {sides}:"
        return Cell(where, round(gain, DIGITS), self.least, self.most)


def label(number: Number) -> str:
    """Model, budget and task of a number, as far as it has them."""
    budget = "" if number.budget is None else f" at {number.budget}"
    return f"{number.model}{budget} {number.task}".strip()


def _printed(number: Number) -> str:
    """Method and number, and whether it contradicts its own row."""
    doubtful = " (not the mean of its row)" if "printed avg disagrees" in number.note else ""
    return f"{number.method} {number.printed}{doubtful}"


def _beside(numbers: tuple[Number, ...], number: Number, rival: str) -> Number | None:
    """The rival's number of the same cell; one without the budget where that means another thing to it."""
    alike = [
        other
        for other in numbers
        if other.method == rival
        and (other.model, other.task, other.metric) == (number.model, number.task, number.metric)
    ]
    exact = [other for other in alike if other.budget == number.budget]
    free = rival == BASELINE or number.budget_kind == "bits"  # the full cache has no budget; code widths differ
    found = exact or (alike if free and len(alike) == 1 else [])
    return found[0] if found else None


@dataclass(frozen=True)
class Falling:
    """That the gain of `compared` shrinks as the budget grows: a cell for every step to the next larger one."""

    compared: Compared

    @property
    def unit(self) -> str:
        return f"{self.compared.unit} of gain lost per step"

    def evidence(self) -> Evidence:
        lines: dict[tuple[str, str, str], list[tuple[int | float, Cell]]] = {}
        for number, cell in (gain for gain in self.compared.gains() if gain is not None):
            if number.budget is not None:
                lines.setdefault((number.model, number.method, number.task), []).append((number.budget, cell))
        cells = []
        for (model, method, task), points in lines.items():
            for (low, before), (high, after) in pairwise(sorted(points, key=lambda point: point[0])):
                where = f"{model} {method} {task} {low} to {high}: {before.gain:+.4g} to {after.gain:+.4g}:"
                cells.append(Cell(where, round(before.gain - after.gain, DIGITS)))
        return Evidence(tuple(cells), missing="" if cells else "no two budgets are printed")


@dataclass(frozen=True)
class Computed:
    """Cells that a function computes, from published numbers or with our own code."""

    function: Callable[[], list[Cell]]
    unit: str

    def evidence(self) -> Evidence:
        return Evidence(tuple(self.function()))


@dataclass(frozen=True)
class Unprinted:
    """Nothing is printed that could decide: why, and what would give it."""

    missing: str
    unit: str = ""

    def evidence(self) -> Evidence:
        return Evidence(missing=self.missing)
