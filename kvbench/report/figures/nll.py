"""Figure of NLL against context length (D2O, figure 6), one line for each run that scored given texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from kvbench.report.figures.panels import looks, notes
from kvbench.report.figures.sheet import Paper, Sheet
from kvbench.report.figures.style import Look
from kvbench.results.result import Result

SAME = 1e-3  # nats


def curves(rows: Sequence[Result], _: Mapping[str, Look], paper: Paper) -> list[tuple[str, Figure]]:
    """One panel for each task and model, from the length at which the lines begin to differ.

    A line is solid up to the length of the shortest text and dotted where fewer texts are averaged.
    """
    with_budget = {run: run.line if run.budget is None else f"{run.line}, {run.budget}" for run in rows}
    read = [replace(run, line=with_budget[run]) for run in rows if run.curve]
    if not read:
        return []
    of_runs = looks(read)
    panels: dict[tuple[str, str], list[Result]] = {}
    for run in read:
        panels.setdefault((run.task_label, run.model_label), []).append(run)
    sheet = Sheet(len(panels), 2, *((6.0, 4.5) if len(panels) == 1 else (4.2, 3.5)), paper)
    for (about, members), axes in zip(panels.items(), sheet.axes, strict=True):
        _panel(axes, members, of_runs)
        sheet.set_title(axes, ", ".join((paper.task(about[0]), about[1])))
        axes.set(xlabel="context length (tokens)", ylabel="NLL so far (nats per token)")
    below = notes(read, "Mean over all tokens so far, lower is better.")
    blocks = sorted({run.block for run in read if run.block is not None})
    below += [f"Tokens scored between two evictions: {', '.join(map(str, blocks))}."] if blocks else []
    return [("nll", sheet.finish("NLL against context length", [*below, "Dotted: some texts are shorter."]))]


def _panel(axes: Axes, runs: Sequence[Result], of_runs: Mapping[str, Look]) -> None:
    drawn = {run: run.curve for run in runs if run.curve}
    for run, curve in sorted(drawn.items(), key=lambda pair: pair[1]["nll"][-1], reverse=True):
        reached = sum(texts == run.n for texts in curve["texts"])
        style = {**of_runs[run.line].plot, "zorder": 3 if run.is_full else 2}
        axes.plot(curve["lengths"][:reached], curve["nll"][:reached], label=run.line, **style)
        beyond = slice(max(reached - 1, 0), None)
        axes.plot(curve["lengths"][beyond], curve["nll"][beyond], **{**style, "linestyle": ":", "alpha": 0.7})
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: f"{tokens:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    first = parting([*drawn.values()])
    seen = [nll for c in drawn.values() for n, nll in zip(c["lengths"], c["nll"], strict=True) if n >= first]
    last = max(curve["lengths"][-1] for curve in drawn.values())
    edge = 0.05 * (max(seen) - min(seen)) or 0.1
    axes.set_xlim(first / 1.15, max(last * 1.08, first * 1.5))
    axes.set_ylim(min(seen) - edge, max(seen) + edge)


def parting(curves: Sequence[Mapping[str, Sequence[float]]]) -> float:
    """The last length up to which all curves are equal; the first length if they are never or always equal."""
    shared = sorted(set.intersection(*(set(curve["lengths"]) for curve in curves)))
    values = [dict(zip(curve["lengths"], curve["nll"], strict=True)) for curve in curves]
    different = [n for n in shared if max(v[n] for v in values) - min(v[n] for v in values) > SAME]
    start = min(curve["lengths"][0] for curve in curves)
    return max((n for n in shared if n < different[0]), default=start) if different else start
