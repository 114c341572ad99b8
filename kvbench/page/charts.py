"""Score against budget and against bytes held, as plotly figures: a card per task, model and axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log10
from typing import Any

from kvbench.analysis.result import Result
from kvbench.page.rows import budget_words
from kvbench.report.figures.panels import Panel, height, panels_of, sides
from kvbench.report.figures.score import Axis, Point, budget_axis, byte_axis, covering
from kvbench.report.figures.sheet import side_by_side
from kvbench.report.figures.style import FAINT, GRID, INK, Look, byte_unit

SYMBOLS = {
    "o": "circle",
    "s": "square",
    "^": "triangle-up",
    "D": "diamond",
    "v": "triangle-down",
    "P": "cross",
    "X": "x",
    "<": "triangle-left",
    ">": "triangle-right",
    "p": "pentagon",
    "h": "hexagon",
    "d": "diamond-tall",
    "*": "star",
    "H": "hexagon2",
    "8": "octagon",
}
"""Our markers by plotly's names."""
SIZE, WIDER = 8, 5  # pixels of a point, and what each that covers it adds
FONT = {"family": "system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif", "size": 12, "color": INK}
AXES = {"budget": "budget", "bytes": "bytes held"}

Spec = dict[str, Any]


@dataclass(frozen=True)
class Card:
    """A figure, and the fields by which it is filtered."""

    title: str
    model: str
    task: str
    axis: str
    spec: Spec


def cards(entries: Sequence[Result], looks: Mapping[str, Look]) -> list[Card]:
    """Two cards for every task and model where something was evicted or stored small: by budget, and by bytes."""
    found = []
    for panel in panels_of(entry for entry in entries if entry.value is not None):
        for axis, words in AXES.items():
            spec = figure(panel, looks, axis)
            if spec is not None:
                found.append(Card(f"{panel.task}, by {words}", panel.model, panel.task, axis, spec))
    return found


def figure(panel: Panel, looks: Mapping[str, Look], by: str) -> Spec | None:
    """One panel: a line per policy, its 95% intervals as bars, the full cache as a level. None without a point."""
    cells = panel.cells
    shares = [isinstance(e.budget, float) for e in cells if e.budget is not None]
    if by == "budget" and len(set(shares)) > 1:  # shares and tokens are no common axis: the more frequent kind
        most = 2 * sum(shares) > len(shares)
        cells = [e for e in cells if e.budget is None or isinstance(e.budget, float) == most]
    axis = byte_axis(cells) if by == "bytes" else budget_axis(cells)
    lines: dict[str, list[Result]] = {}
    for cell in sorted((cell for cell in cells if axis.has(cell)), key=axis.at):
        lines.setdefault(cell.line, []).append(cell)
    if not lines:
        return None
    names = [name for name in panel.lines if name in lines]  # beside each other at a category, in this order
    aside = [0.0] * len(names) if axis.categories is None else side_by_side(len(names))
    points = [
        [(axis.at(cell) + move, height(cell)) for cell in lines[name]] for name, move in zip(names, aside, strict=True)
    ]
    traces = [_trace(lines[name], looks[name], points, place) for place, name in enumerate(names)]
    across = _across(axis, [x for line in points for x, _ in line])
    left, right = across["range"]
    steps = [left + (right - left) * i / 8 for i in range(9)]  # something to point at all along
    traces += _level([e for e in cells if e.is_full], steps if axis.categories else [10**x for x in steps])
    return {"data": traces, "layout": _layout([c for own in lines.values() for c in own], across, cells[0].reads)}


def _trace(line: Sequence[Result], look: Look, points: Sequence[Sequence[Point]], place: int) -> Spec:
    """A line. Its points are rings, wider for each of the later lines that has one at the same place."""
    covered = [covering(point, points[place + 1 :]) for point in points[place]]
    symbol = SYMBOLS[look.marker]
    plain = symbol + "-open" * look.hollow
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": line[0].line,
        "x": [round(x, 5) for x, _ in points[place]],
        "y": [_rounded(y) for _, y in points[place]],
        "error_y": {
            "type": "data",
            "symmetric": False,
            "color": look.colour,
            "thickness": 1,
            "width": 0,
            **_sides(line),
        },
        "line": {"color": look.colour, "width": 2, "dash": dash(look)},
        "marker": {
            "symbol": [f"{symbol}-open" if count else plain for count in covered],
            "size": [SIZE + WIDER * count for count in covered],
            "line": {"width": [1.6 if count else 0 for count in covered]},
            "color": look.colour,
            "opacity": 1,
        },
        "text": [hover(e) for e in line],
        "hovertemplate": "%{text}<extra></extra>",
        "meta": {"line": line[0].line, "schedule": line[0].moments[0]},
    }


def dash(look: Look) -> str:
    """The dashes of a line as SVG and plotly have them."""
    if isinstance(look.line, str):
        return "solid"
    return ",".join(f"{2 * length:g}px" for length in look.line[1])


def _sides(line: Sequence[Result]) -> Spec:
    """How far the intervals reach up and down."""
    below, above = zip(*map(sides, line), strict=True)
    return {"array": [*map(_rounded, above)], "arrayminus": [*map(_rounded, below)]}


def hover(entry: Result) -> str:
    """The text shown for a point. Plotly reads some HTML in it, so names are escaped."""
    interval = "" if entry.ends is None else f" ({entry.ends[0]:.3f} to {entry.ends[1]:.3f})"
    what = "NLL" if entry.reads else "score"
    lines = [f"<b>{_plain(entry.line)}</b>", f"{what} {entry.value:.3f}{interval}"]
    lines.append(f"budget {budget_words(entry.budget)}, {entry.n} examples")
    if entry.cache_bytes is not None:
        unit, size = byte_unit(entry.cache_bytes)
        of_full = "" if entry.cache_share is None else f", {100 * entry.cache_share:.1f}% of full"
        states = f", {entry.state_bytes / size:.4g} of it recurrent states" if entry.state_bytes else ""
        lines.append(f"{entry.cache_bytes / size:.4g} {unit} held{of_full}{states}")
    if entry.kept_tokens is not None:
        lines.append(f"{entry.kept_tokens:.1f} tokens per KV head")
    return "<br>".join(lines)


def _plain(words: str) -> str:
    return words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _level(full: Sequence[Result], steps: Sequence[float]) -> list[Spec]:
    """The full cache: a dashed level over the whole width, its interval as a grey band."""
    if not full or full[0].value is None:
        return []
    entry = full[0]
    common = {"type": "scatter", "mode": "lines", "hoverinfo": "skip", "showlegend": False}
    traces: list[Spec] = []
    if entry.ends is not None:
        low, high = entry.ends
        xs, ys = [steps[0], steps[-1], steps[-1], steps[0]], [low, low, high, high]
        band = {"x": xs, "y": ys, "fill": "toself", "fillcolor": "rgba(107,107,107,0.12)", "line": {"width": 0}}
        traces.append({**common, **band, "meta": {"line": entry.line, "schedule": ""}})
    dashed = {"color": "#000000", "width": 1.4, "dash": "7px,4px"}
    said = {"hoverinfo": "text", "hovertemplate": "%{text}<extra></extra>", "text": [hover(entry)] * 9}
    level = {"x": steps, "y": [_rounded(entry.value)] * 9, "line": dashed, "name": entry.line}
    return [*traces, {**common, **level, **said, "meta": {"line": entry.line, "schedule": ""}}]


def _across(axis: Axis, span: Sequence[float]) -> Spec:
    """The horizontal axis as plotly has it."""
    if axis.categories is None:
        edge = 2.0 if max(span) < 1.5 * min(span) else 1.25  # nearly the same bytes shall look so
        ends = [log10(min(span) / edge), log10(max(span) * edge)]
        return {"title": axis.words, "type": "log", "range": ends, "nticks": 6}
    ticks = {"tickvals": list(range(len(axis.categories))), "ticktext": list(axis.categories)}
    ends = [-0.5, len(axis.categories) - 0.5]
    return {"title": axis.words, "type": "linear", "range": ends, "showgrid": False, **ticks}


def _layout(entries: Sequence[Result], across: Spec, reads: bool) -> Spec:
    up: Spec = {"title": {"text": "NLL, nats per token" if reads else "score", "standoff": 6}}
    if not reads and all(e.ends is None or (e.ends[0] >= 0 and e.ends[1] <= 1) for e in entries):
        up["range"] = [-0.03, 1.03]
    return {
        **base_layout(),
        "xaxis": {**_axis(), **across, "title": {"text": across["title"], "standoff": 8}},
        "yaxis": {**_axis(), **up},
        "height": 300,
        "margin": {"l": 52, "r": 12, "t": 8, "b": 46},
    }


def base_layout() -> Spec:
    """The layout that all figures of the page share."""
    return {
        "font": FONT,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "showlegend": False,
        "hovermode": "closest",
        "hoverlabel": {"bgcolor": "#ffffff", "bordercolor": "#c8ccd4", "font": FONT, "align": "left"},
    }


def _axis() -> Spec:
    return {
        "gridcolor": GRID,
        "linecolor": FAINT,
        "zeroline": False,
        "showline": True,
        "ticks": "outside",
        "ticklen": 4,
        "tickcolor": FAINT,
        "automargin": True,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)
