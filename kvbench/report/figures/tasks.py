"""Scores task by task at one budget: a panel of bars for every task, or category of a benchmark, policies below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvbench.analysis.metrics import metrics
from kvbench.analysis.result import Result
from kvbench.records.sample import Sample
from kvbench.report.figures.panels import rank
from kvbench.report.figures.remarks import notes
from kvbench.report.figures.sheet import Paper, Sheet, inches_wide
from kvbench.report.figures.style import FAINT, Look

BAR, WIDE = 0.165, 2.1  # inches: the height a policy takes, the width of a panel
COLUMNS = 4
LEAST = 0.75  # inches of a panel
UNCOMPRESSED = "#9a9a9a"  # a black bar would hide its interval
BAR_ALPHA = 0.6  # so would a dark one
OVERALL = "overall"


@dataclass(frozen=True)
class Bar:
    """One bar: a score from 0 to 1, and its 95% interval where it has one."""

    score: float
    low: float | None
    high: float | None


Bars = Mapping[str, Mapping[str, Bar]]  # by task, then by policy


def by_task(
    cells: Sequence[Result], palette: Mapping[str, Look], paper: Paper | None = None
) -> list[tuple[str, Figure]]:
    """One picture per model and budget, where there are at least two tasks; policies without a budget are in all."""
    found = []
    for model in dict.fromkeys(cell.model for cell in cells):
        own = [cell for cell in cells if cell.model == model]
        budgets: list[int | float | None] = [*sorted({cell.budget for cell in own if cell.budget is not None})]
        for budget in budgets or [None]:
            chosen = [cell for cell in own if cell.budget in (None, budget)]
            bars = _bars(chosen)
            if len(bars) > 1:
                name = f"tasks-{model}-{'all' if budget is None else f'{budget:g}'}"
                found.append((name, _picture(bars, chosen, palette, paper)))
    return [("tasks", found[0][1])] if len(found) == 1 else found


def _bars(cells: Sequence[Result]) -> dict[str, dict[str, Bar]]:
    """Bars of every task: a run of several tasks is split by task, and adds its official overall score."""
    bars: dict[str, dict[str, Bar]] = {}
    for cell in cells:
        for task, bar in _parts(cell).items():
            bars.setdefault(task, {})[cell.line] = bar
    return bars


def _parts(cell: Result) -> dict[str, Bar]:
    """A cell's bars by task: its own alone, or those of the tasks its examples name."""
    parts = _by_name(cell)
    if len(parts) < 2:
        return {} if cell.score is None else {cell.task: Bar(cell.score, cell.score_low, cell.score_high)}
    bars = {}
    for name, samples in parts.items():
        numbers = metrics(samples)
        if numbers["score"] is not None:
            bars[name] = Bar(numbers["score"], numbers["score_low"], numbers["score_high"])
    official = cell.official.get(OVERALL)
    if official is not None:
        bars[f"{cell.task}, overall (official)"] = Bar(official / 100, None, None)
    return bars


def _by_name(cell: Result) -> dict[str, list[Sample]]:
    members: dict[str, list[Sample]] = {}
    for sample in cell.samples:
        if (name := sample.metadata.get("task")) is not None:
            members.setdefault(_category(sample, str(name)), []).append(sample)
    return members


def _category(sample: Sample, task: str) -> str:
    """The task an example names, with its language where it names one too."""
    language = sample.metadata.get("language")
    return f"{task.replace('_', ' ')}, {language}" if language else task


def _picture(bars: Bars, cells: Sequence[Result], palette: Mapping[str, Look], paper: Paper | None) -> Figure:
    policies = list(dict.fromkeys(c.line for c in sorted(cells, key=lambda c: rank(c))))
    policies = [policy for policy in policies if any(policy in task for task in bars.values())]
    beside = inches_wide(policies) + 0.4
    columns = min(COLUMNS, len(bars))
    size = WIDE + beside / columns, BAR * len(policies) + 0.8
    sheet = Sheet(len(bars), columns, *size, paper, LEAST, beside, in_shape=False)
    for index, ((task, own), axes) in enumerate(zip(bars.items(), sheet.axes, strict=True)):
        _panel(axes, own, policies, palette, sheet.is_left(index))
        sheet.set_title(axes, task, size=8, beside=0.3 + beside / columns)
        if sheet.is_bottom(index):
            axes.set_xlabel("score")
    budget = next((cell.budget for cell in cells if cell.budget is not None), None)
    said = notes(cells, "Thin lines: 95% intervals.")
    parted = any(len(_by_name(cell)) > 1 for cell in cells)
    said[0] = said[0].replace("for every point", "for every run, its tasks together" if parted else "for every bar")
    full = [cell for cell in cells if cell.is_full]
    if full:
        said[0] += " Dashed: the full cache, its interval in grey."
    unit = "tokens per KV head and layer" if isinstance(budget, int) else "of the prompt"
    at = "" if budget is None else f" at a budget of {budget:g} {unit}"
    return sheet.finish(f"Score by task{at}", said)


def _panel(
    axes: Axes, bars: Mapping[str, Bar], policies: Sequence[str], palette: Mapping[str, Look], left: bool
) -> None:
    """Bars from the top down; the score's number stands at the right edge."""
    for place, policy in enumerate(policies):
        bar = bars.get(policy)
        if bar is None:
            continue
        look = palette[policy]
        colour = look.colour if look.marker else UNCOMPRESSED
        axes.barh(place, bar.score, height=0.72, color=colour, alpha=BAR_ALPHA, label=policy)
        if bar.low is not None and bar.high is not None:
            ends = [[max(0.0, bar.score - bar.low)], [max(0.0, bar.high - bar.score)]]
            axes.errorbar(bar.score, place, xerr=ends, fmt="none", ecolor="#111111", elinewidth=0.9)
        at_edge: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "center_baseline", "fontsize": 7}
        axes.text(1.03, place, f"{bar.score:.2f}", **at_edge)
        if not look.marker:  # the full cache
            axes.axvline(bar.score, color="black", linestyle=look.line, linewidth=1, zorder=3)
            if bar.low is not None and bar.high is not None:
                axes.axvspan(bar.low, bar.high, color=FAINT, alpha=0.13, linewidth=0, zorder=0.5)
    high = max([1.0, *(bar.high or bar.score for bar in bars.values())])
    axes.set_xlim(min([0.0, *(b.score if b.low is None else b.low for b in bars.values())]), high)
    axes.set_ylim(len(policies) - 0.4, -0.6)
    axes.set_yticks(range(len(policies)), policies if left else [""] * len(policies))
    axes.tick_params(axis="y", length=0, pad=3)
    axes.grid(axis="y", visible=False)
