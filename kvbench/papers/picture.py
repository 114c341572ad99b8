"""The picture of a paper's budgets: what share of the full cache's bytes each method holds at the same budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvbench.papers import arrangement
from kvbench.papers.held import share
from kvbench.papers.layout import budget_text
from kvbench.papers.protocol import plan
from kvbench.papers.published import BASELINE
from kvbench.report.figures.pictures import write
from kvbench.report.figures.sheet import Sheet, by_factors, inches_wide
from kvbench.report.figures.style import HUES, MARKERS, house_style

WIDTH, ROW = 3.2, 0.19  # inches of a panel, and of a method in it
COLUMNS = 3
CLOSE = 0.01  # a percent of a share is not to be seen
UNTOLD = "cannot be told without running it"  # what `predict` says of budgets that follow from the prompt


@dataclass(frozen=True)
class Dot:
    """The share of the full cache's bytes that a method holds at a budget, in percent; or why that is unknown."""

    model: str
    method: str
    budget: str
    percent: float | None
    reason: str = ""


def dots(tables: Sequence[str], length: int) -> list[Dot]:
    """Each model, method and budget of some tables once, after a prompt of `length` tokens."""
    found: dict[tuple[str, str, str], Dot] = {}
    for name in tables:
        for number in arrangement.numbers(name):
            called = arrangement.names().labels["method"].get(number.method, number.method)
            place = number.model, called, budget_text(number)
            known = found.get(place)
            if number.method != BASELINE and number.model and (known is None or known.percent is None):
                held = share(plan(number), length)
                percent = None if isinstance(held, str) else 100 * held[0] / held[1]
                found[place] = Dot(*place, percent, held if isinstance(held, str) else "")
    return list(found.values())


def draw(what: str, tables: Sequence[str], length: int, path: Path) -> None:
    """Write the picture of some tables. UsageError where the format is unknown or the file cannot be written."""
    with house_style():
        write([(path.stem, picture(what, dots(tables, length), length))], path, path.suffix)


def picture(what: str, found: Sequence[Dot], length: int) -> Figure:
    """A panel for each model, or models that are alike, a row for each method, a mark for each budget."""
    told = [dot for dot in found if dot.percent is not None]
    panels = alike(told)
    methods = list(dict.fromkeys(dot.method for dot in told))
    budgets = sorted({dot.budget for dot in told}, key=_size)
    beside = inches_wide(methods) + 0.4
    size = WIDTH + beside / min(COLUMNS, len(panels)), ROW * (len(methods) + 1) + 0.9
    sheet = Sheet(len(panels), COLUMNS, *size, beside=beside, in_shape=False)
    percents = [dot.percent for dot in told if dot.percent is not None]
    for place, (axes, (models, own)) in enumerate(zip(sheet.axes, panels, strict=True)):
        _panel(axes, own, methods, budgets)
        axes.set_xlim(min(percents) / 1.2, max(percents) * 1.2)
        sheet.set_title(axes, ", ".join(models), beside=0.3 + beside / sheet.columns)
        axes.tick_params(labelleft=sheet.is_left(place))
        axes.set_xlabel("bytes held, % of the full cache" if sheet.is_bottom(place) else "")
    untold = sorted({dot.method for dot in found if dot.percent is None and UNTOLD in dot.reason})
    notes = [
        f"Predicted for a prompt of {length:,} tokens and 16-bit models: keys, values, positions, running statistics.",
        "Marks of one budget above each other: the same budget is the same memory.",
    ]
    if untold:
        notes.append(f"Not drawn, for their bytes depend on what the prompt says: {', '.join(untold)}.")
    handles: list[Any] = [sheet.axes[0].plot([], [], **_look(place))[0] for place in range(len(budgets))]
    words = [f"budget {budget}" if budget[0].isdigit() and " " not in budget else budget or "-" for budget in budgets]
    return sheet.finish(f"{what}: is the same budget the same memory?", notes, (handles, words))


def alike(found: Sequence[Dot]) -> list[tuple[list[str], list[Dot]]]:
    """Models together of which every method holds the same share wherever they share one, and their dots, each once."""
    panels: list[tuple[list[str], dict[tuple[str, str], Dot]]] = []
    for model in dict.fromkeys(dot.model for dot in found):
        own = {(dot.method, dot.budget): dot for dot in found if dot.model == model}
        for models, dots in panels:
            both = own.keys() & dots.keys()
            if both and all(_close(own[place], dots[place]) for place in both):
                models.append(model)
                dots.update(own)
                break
        else:
            panels.append(([model], own))
    return [(models, list(dots.values())) for models, dots in panels]


def _close(one: Dot, other: Dot) -> bool:
    assert one.percent is not None, "dots without a share are not drawn"
    assert other.percent is not None, "dots without a share are not drawn"
    return abs(one.percent - other.percent) < CLOSE * other.percent


def _panel(axes: Axes, found: Sequence[Dot], methods: Sequence[str], budgets: Sequence[str]) -> None:
    for place, budget in enumerate(budgets):
        own = [dot for dot in found if dot.budget == budget and dot.percent is not None]
        rows = [methods.index(dot.method) for dot in own]
        axes.plot([dot.percent or 0.0 for dot in own], rows, **_look(place))
    by_factors(axes, "x", (1, 50))
    axes.set_ylim(len(methods) - 0.4, -0.6)
    axes.set_yticks(range(len(methods)), methods)


def _look(place: int) -> dict[str, Any]:
    colour = HUES[place % len(HUES)]
    return {"linestyle": "none", "marker": MARKERS[place % len(MARKERS)], "color": colour, "markersize": 4.5}


def _size(budget: str) -> tuple[bool, float]:
    """Budgets in tokens by size, then shares, then widths."""
    number = budget.partition(" ")[0]
    return (not number.isdigit(), float(number.rstrip("%") or 0))
