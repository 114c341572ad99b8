"""The picture of a paper's budgets: what share of the full cache's bytes each method holds at the same budget."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from kvbench.papers import arrangement
from kvbench.papers.held import share
from kvbench.papers.layout import budget_text
from kvbench.papers.protocol import plan
from kvbench.papers.published import BASELINE
from kvbench.report.figures.pictures import write
from kvbench.report.figures.sheet import Gaps, Sheet, inches_wide
from kvbench.report.figures.style import HUES, MARKERS, house_style

WIDTH, ROW, LINE = 3.2, 0.19, 0.17  # inches of a panel, of a method in it, and of a line of its title
COLUMNS = 3
NAMES = 50  # letters above a panel
CLOSE = 0.01  # a percent of a share is not to be seen
TICK = 8  # points
UNTOLD = "cannot be told without running it"  # what `predict` says of budgets that follow from the prompt


@dataclass(frozen=True)
class Dot:
    """What a method holds at a budget: percent of the full cache's bytes; why, where that cannot be told."""

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
    titles = [_in_lines(models) for models, _ in panels]
    above = LINE * max(map(len, titles))
    gaps = Gaps(left=0.2 + inches_wide(methods, TICK), across=0.2, down=0.5 + above, top=0.15 + above)
    sheet = Sheet(len(panels), COLUMNS, WIDTH, ROW * (len(methods) + 1), gaps)
    percents = [dot.percent for dot in told if dot.percent is not None]
    for place, (axes, (_, own)) in enumerate(zip(sheet.axes, panels, strict=True)):
        _panel(axes, own, methods, budgets)
        axes.set_xlim(min(percents) / 1.2, max(percents) * 1.2)
        axes.set_title("\n".join(titles[place]), loc="left")
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


def _in_lines(models: Sequence[str]) -> list[str]:
    """Names of models, as many in a line as a panel is wide."""
    return textwrap.wrap(", ".join(models), NAMES, break_long_words=False, break_on_hyphens=False)


def _panel(axes: Axes, found: Sequence[Dot], methods: Sequence[str], budgets: Sequence[str]) -> None:
    for place, budget in enumerate(budgets):
        own = [dot for dot in found if dot.budget == budget and dot.percent is not None]
        rows = [methods.index(dot.method) for dot in own]
        axes.plot([dot.percent or 0.0 for dot in own], rows, **_look(place))
    axes.set(xscale="log", ylim=(len(methods) - 0.4, -0.6))
    axes.set_yticks(range(len(methods)), methods)
    axes.xaxis.set_major_locator(LogLocator(10, subs=(1, 1.5, 2, 3, 5, 7)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _look(place: int) -> dict[str, Any]:
    colour = HUES[place % len(HUES)]
    return {"linestyle": "none", "marker": MARKERS[place % len(MARKERS)], "color": colour, "markersize": 4.5}


def _size(budget: str) -> tuple[bool, float]:
    """Budgets in tokens by size, then shares, then widths."""
    number = budget.partition(" ")[0]
    return (not number.isdigit(), float(number.rstrip("%") or 0))
