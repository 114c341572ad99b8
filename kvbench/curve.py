"""The picture of reading with a small cache: cumulative NLL against context length (D2O, figure 6), a line per run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from kvbench.labels import keeps_all
from kvbench.results import RunRecord

PICTURES = (".svg", ".png", ".pdf")
MARKERS = "os^Dv*"


def draw(runs: Sequence[RunRecord], path: Path) -> int:
    """Write one line per run, one panel per task and model, and return the number of lines.

    A line is solid as far as all texts of its run reach and dashed beyond, where fewer are averaged.
    Raises ValueError where there is nothing to draw, OSError where `path` cannot be written.
    """
    if not runs:
        raise ValueError(
            "no run has scored given texts (task=perplexity, pg19 or booksum), so there is no curve to draw"
        )
    panels: dict[tuple[str, str], list[RunRecord]] = {}
    for run in runs:
        panels.setdefault((run.names["task"], run.names["model"]), []).append(run)
    figure = Figure(figsize=(1.5 + 5.5 * len(panels), 4.2), layout="constrained")
    for axes, (names, members) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        _panel(axes, members)
        axes.set_title(", ".join(names), fontsize=10)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    return len(runs)


def _panel(axes: Axes, runs: Sequence[RunRecord]) -> None:
    """One axes: a colour for each policy, a marker for each budget; the legend in the order of the line ends."""
    policies, budgets = (list(dict.fromkeys(map(of, runs))) for of in (_policy, _budget))
    longer = False
    for run in sorted(runs, key=lambda run: run.metrics["likelihood"]["curve"]["nll"][-1], reverse=True):
        curve = run.metrics["likelihood"]["curve"]
        full = keeps_all(run.identity)
        style: dict[str, Any] = {
            "color": "black" if full else f"C{policies.index(_policy(run)) % 10}",
            "marker": MARKERS[budgets.index(_budget(run)) % len(MARKERS)],
            "markersize": 3.5,
            "linewidth": 1.4,
            "zorder": 3 if full else 2,
        }
        reached = sum(texts == run.metrics["n"] for texts in curve["texts"])
        words = [_policy(run), *([] if _budget(run) is None else [str(_budget(run))])]
        label = ", ".join([*words, *(f"{name}={value}" for name, value in run.differs.items())])
        axes.plot(curve["lengths"][:reached], curve["nll"][:reached], label=label, **style)
        beyond = slice(max(reached - 1, 0), None)
        axes.plot(curve["lengths"][beyond], curve["nll"][beyond], linestyle="--", **style)
        longer |= reached < len(curve["lengths"])
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: f"{tokens:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("context length (tokens)" + ("; dashed: some of the texts are shorter" if longer else ""))
    axes.set_ylabel("mean NLL so far (nats per token), lower is better")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, frameon=False)


def _policy(run: RunRecord) -> str:
    return run.names["policy"]


def _budget(run: RunRecord) -> int | float | None:
    budget: int | float | None = run.identity["budget"]
    return budget
