"""Heat maps: needle tests by length and depth, and how many tokens each layer and KV head keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kvbench.analysis.result import Result
from kvbench.page.charts import Card, Spec, base_layout
from kvbench.page.rows import budget_words
from kvbench.report.figures.heatmap import grid_of
from kvbench.report.figures.panels import panels_of

SCALE = [[0, "#eef2f6"], [1, "#0072b2"]]  # one hue from light to dark, as the other squares of the page
ROW, HEAD = 22, 74  # pixels: a row of a map, and what stands above and below it


def needle_maps(entries: Sequence[Result]) -> list[Card]:
    """Score by depth (one length), or by depth and length, wherever examples have both; a row or a map per policy."""
    found = []
    for panel in panels_of(entries):
        model, task = panel.model, panel.task
        grids = {e: grid for e in panel.cells if (grid := grid_of(e.samples))}
        lengths, depths = (sorted({cell[axis] for grid in grids.values() for cell in grid}) for axis in (0, 1))
        if len(depths) < 2:
            continue
        if len(lengths) == 1:
            title = f"{task}: depth of the needle, {lengths[0]:,g} tokens"
            found.append(Card(title, model, task, "strip", _strips(grids, lengths[0], depths)))
            continue
        for entry, grid in grids.items():
            at = "" if entry.budget is None else f", {budget_words(entry.budget)}"
            title = f"{entry.line}{at}: {entry.value:.2f}"  # as the tables have it: the mean over examples, not cells
            found.append(Card(title, model, task, "map", _map(grid, lengths, depths)))
    return found


def budget_maps(entries: Sequence[Result]) -> list[Card]:
    """Mean tokens each layer and KV head holds at the end, as a multiple of the run's own mean; a row per policy."""
    found = []
    for panel in panels_of(entries):
        held = {e: kept for e in panel.cells if not e.is_full and (kept := mean_kept(e)) is not None}
        shape = max((kept.shape for kept in held.values()), default=(0, 0))
        same = {e: kept for e, kept in held.items() if kept.shape == shape}
        if any(np.ptp(kept) > 0 for kept in same.values()):
            found.append(
                Card(f"{panel.task}: tokens by layer and KV head", panel.model, panel.task, "kept", _kept(same))
            )
    return found


def mean_kept(entry: Result) -> np.ndarray | None:
    """[L, H_kv] tokens held at the end, mean over the examples; None where layers differ in their heads."""
    kept = [sample.kept_tokens for sample in entry.samples if sample.kept_tokens]
    if not kept or len({len(heads) for layers in kept for heads in layers}) > 1:
        return None
    mean: np.ndarray = np.asarray(kept, dtype=np.float64).mean(axis=0)
    return mean


def _names(entries: Sequence[Result]) -> list[str]:
    return [e.line if e.budget is None else f"{e.line}, {budget_words(e.budget)}" for e in entries]


def _strips(
    grids: Mapping[Result, Mapping[tuple[float, float], float]], length: float, depths: Sequence[float]
) -> Spec:
    rows = _names(list(grids))
    z = [[_rounded(grid.get((length, depth))) for depth in depths] for grid in grids.values()]
    across = {"title": {"text": "depth of the needle (%)", "standoff": 6}, "type": "category"}
    return _heat([f"{depth:.3g}" for depth in depths], rows, z, across, "depth %{x}%, score %{z:.2f}")


def _map(grid: Mapping[tuple[float, float], float], lengths: Sequence[float], depths: Sequence[float]) -> Spec:
    z = [[_rounded(grid.get((length, depth))) for length in lengths] for depth in depths]
    across = {"title": {"text": "length (tokens)", "standoff": 6}, "type": "category"}
    hover = "length %{x}, depth %{y}%, score %{z:.2f}"
    spec = _heat([f"{length:,g}" for length in lengths], [f"{depth:.3g}" for depth in depths], z, across, hover)
    spec["layout"]["yaxis"]["title"] = {"text": "depth (%)", "standoff": 4}
    spec["layout"]["height"] = max(170, 12 * len(depths) + HEAD)
    spec["data"][0]["showscale"] = False
    return spec


def _kept(held: Mapping[Result, np.ndarray]) -> Spec:
    layers, heads = next(iter(held.values())).shape
    columns = [f"layer {layer}, head {head}" for layer in range(layers) for head in range(heads)]
    z = [[round(float(v), 3) for v in (kept / kept.mean()).flatten()] for kept in held.values()]
    said = [[f"{v:.1f} tokens" for v in kept.flatten()] for kept in held.values()]
    middle = [layer * heads + (heads - 1) / 2 for layer in range(layers)]
    step = -(-layers // 16)
    across = {
        "title": {"text": f"layer, and in it its {heads} KV heads", "standoff": 6},
        "tickvals": middle[::step],
        "ticktext": [str(layer) for layer in range(0, layers, step)],
    }
    spec = _heat(list(range(len(columns))), _names(list(held)), z, across, "%{text}, %{z:.2f} times the mean")
    data = spec["data"][0]
    most = max(2.0, max(map(max, z)))
    data |= {"text": [[f"{c}: {t}" for c, t in zip(columns, row, strict=True)] for row in said]}
    data |= {"zmin": 0, "zmax": most, "xgap": 0}
    data["colorbar"]["title"]["text"] = "times<br>the mean"
    data["colorscale"] = [[0, _DIVERGING[0]], [1 / most, _DIVERGING[1]], [1, _DIVERGING[2]]]
    edges = [layer * heads - 0.5 for layer in range(1, layers)]
    spec["layout"]["shapes"] = list(_walls(edges))
    return spec


_DIVERGING = ("#D55E00", "#f7f7f7", "#0072B2")
"""Fewer tokens than the mean, as many, more."""


def _walls(edges: Sequence[float]) -> Iterator[Spec]:
    for x in edges:
        line = {"color": "#ffffff", "width": 1.5}
        yield {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": line}


def _heat(across: Sequence[Any], down: Sequence[str], z: Sequence[Sequence[Any]], axis: Spec, hover: str) -> Spec:
    """Rows from the top down; the score from 0 to 1 as colour."""
    trace: Spec = {
        "type": "heatmap",
        "x": list(across),
        "y": list(down),
        "z": [list(row) for row in z],
        "zmin": 0,
        "zmax": 1,
        "colorscale": SCALE,
        "xgap": 1,
        "ygap": 1,
        "hoverongaps": False,
        "hovertemplate": f"%{{y}}<br>{hover}<extra></extra>",
        "colorbar": {"thickness": 10, "outlinewidth": 0, "title": {"text": "score", "side": "top"}, "tickfont": _SMALL},
    }
    layout = {
        **base_layout(),
        "xaxis": {"showgrid": False, "zeroline": False, "ticks": "", **axis},
        "yaxis": {"type": "category", "autorange": "reversed", "showgrid": False, "ticks": "", "automargin": True},
        "height": ROW * len(down) + HEAD,
        "margin": {"l": 10, "r": 10, "t": 8, "b": 44},
    }
    return {"data": [trace], "layout": layout}


_SMALL = {"size": 10}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
