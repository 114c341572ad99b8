"""The picture of reading with a small cache: cumulative NLL against context length (D2O, figure 6), a line per run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from kvbench.analysis.result import Result
from kvbench.report.figures.sheet import Paper, Sheet, legend_of
from kvbench.report.figures.style import BASELINE, Look, family, palette

ALONE, AMONG = (6.0, 4.5), (4.2, 3.5)  # inches: a panel by itself, and one of several
SAME = 1e-3  # nats
NLL = "NLL so far (nats per token)"


def read_runs(runs: Sequence[Result]) -> list[Result]:
    """The runs that scored given texts."""
    return [run for run in runs if run.curve]


def curves(runs: Sequence[Result], paper: Paper | None = None) -> Figure:
    """One line per run, one panel per task and model.

    A line is solid as far as all texts of its run reach and dotted beyond, where fewer are averaged.
    Raises ValueError where there is nothing to draw.
    """
    read = read_runs(runs)
    if not read:
        raise ValueError(
            "no run has scored given texts (task=perplexity, pg19 or booksum), so there is no curve to draw"
        )
    looks = palette({name(run): family(run.identity["policy"]) for run in read})
    panels: dict[tuple[str, str], list[Result]] = {}
    for run in read:
        panels.setdefault((run.task, run.model), []).append(run)
    sheet = Sheet(len(panels), 2, *(ALONE if len(panels) == 1 else AMONG), paper)
    shorter = False
    for (about, members), axes in zip(panels.items(), sheet.axes, strict=True):
        shorter |= _panel(axes, members, looks)
        sheet.set_title(axes, ", ".join(about))
        axes.set(xlabel="context length (tokens)", ylabel=NLL)
    said = _notes(read, sheet.axes, shorter)
    return sheet.finish("NLL against context length", said, legend_of(sheet.axes))


def name(run: Result) -> str:
    """Policy and budget, as the legend has them."""
    return run.line if run.budget is None else f"{run.line}, {run.budget}"


def _panel(axes: Axes, runs: Sequence[Result], looks: Mapping[str, Look]) -> bool:
    """Draw the runs; returns whether some texts are shorter than others."""
    shorter = False
    curves = {run: run.curve for run in runs if run.curve}
    for run, curve in sorted(curves.items(), key=lambda pair: pair[1]["nll"][-1], reverse=True):
        look = looks[name(run)]
        reached = sum(texts == run.n for texts in curve["texts"])
        style = {**look.plot, "zorder": 3 if run.policy == BASELINE else 2}
        axes.plot(curve["lengths"][:reached], curve["nll"][:reached], label=name(run), **style)
        beyond = slice(max(reached - 1, 0), None)
        faint = {**style, "linestyle": ":", "alpha": 0.7}
        axes.plot(curve["lengths"][beyond], curve["nll"][beyond], gid="beyond", **faint)
        shorter |= reached < len(curve["lengths"])
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: f"{tokens:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    _zoom(axes, [*curves.values()])
    return shorter


def _zoom(axes: Axes, curves: Sequence[Mapping[str, Sequence[float]]]) -> None:
    """Show the curves from where they differ: before the first eviction they are equal, and much higher."""
    first = _parting(curves)
    seen = [nll for curve in curves for n, nll in zip(curve["lengths"], curve["nll"], strict=True) if n >= first]
    last = max(curve["lengths"][-1] for curve in curves)
    edge = 0.05 * (max(seen) - min(seen)) or 0.1
    axes.set_xlim(first / 1.15, max(last * 1.08, first * 1.5))
    axes.set_ylim(min(seen) - edge, max(seen) + edge)


def _parting(curves: Sequence[Mapping[str, Sequence[float]]]) -> float:
    """The last length up to which all curves are the same; their first where they never are, or always."""
    shared = sorted(set.intersection(*(set(curve["lengths"]) for curve in curves)))
    values = [dict(zip(curve["lengths"], curve["nll"], strict=True)) for curve in curves]
    apart = [n for n in shared if max(v[n] for v in values) - min(v[n] for v in values) > SAME]
    start = min(curve["lengths"][0] for curve in curves)
    return max((n for n in shared if n < apart[0]), default=start) if apart else start


def _notes(runs: Sequence[Result], panels: Sequence[Axes], shorter: bool) -> list[str]:
    models = ", ".join(sorted({run.model for run in runs}))
    sizes = sorted({run.n for run in runs})
    many = f"n = {sizes[0]} texts" if len(sizes) == 1 else f"n = {sizes[0]} to {sizes[-1]} texts, not the same for all"
    said = [f"Model: {models}. {many}. Means are over all tokens so far; lower is better."]
    said.append("m: tokens scored between two evictions.")
    blocks = {run.block for run in runs} - {None}
    if len(blocks) > 1:
        said.append("Mixed block sizes, which are different experiments.")
    if any(axes.get_xlim()[0] > 2 for axes in panels):
        said.append("Drawn from the length on where the lines part; before it all are the same.")
    if shorter:
        said.append("Dotted: some of the texts are shorter, and fewer are averaged.")
    return said
