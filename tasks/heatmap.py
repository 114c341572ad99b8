"""The picture of a needle test: one coloured cell for every length and depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from kvbench.tasks.task import Scored

COLOURS = ("#d6604d", "#fbe6a3", "#4393c3")  # missed, half, found: told apart by the colour-blind, too
_MOST_LABELS = 160  # cells up to which each shows its number


def cells_of_answers(answers: Sequence[Scored]) -> dict[tuple[float, float], float]:
    """Mean score, in percent, of every (length, depth) among the answers that have both and a score."""
    members: dict[tuple[float, float], list[float]] = {}
    for answer in answers:
        length, depth = answer.metadata.get("length"), answer.metadata.get("depth")
        if length is not None and depth is not None and answer.score is not None:
            members.setdefault((length, depth), []).append(100 * answer.score)
    return {cell: fmean(scores) for cell, scores in members.items()}


def draw(cells: Mapping[tuple[float, float], float], path: Path, title: str) -> None:
    """Write a heat map of scores from 0 to 100: lengths to the right, depths downwards. The suffix says the format.

    cells: by (length in tokens, depth in percent or as a share). A cell that is missing stays grey.
    Raises ValueError without cells, OSError where `path` cannot be written.
    """
    if not cells:
        raise ValueError(f"{title}: there is no cell to draw, a heat map needs scores with a length and a depth")
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # here: a second, which only pictures have to wait for
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    lengths, depths = (sorted({cell[axis] for cell in cells}) for axis in (0, 1))
    scores = [[cells.get((length, depth), float("nan")) for length in lengths] for depth in depths]
    figure = Figure(figsize=(1.6 + 0.62 * max(len(lengths), 5), 1.4 + 0.3 * max(len(depths), 5)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colours = LinearSegmentedColormap.from_list("needles", COLOURS).with_extremes(bad="#d9d9d9")
    image = axes.imshow(scores, cmap=colours, vmin=0, vmax=100, aspect="auto")
    axes.set_xticks(range(len(lengths)), [_tokens(length) for length in lengths], rotation=45)
    percent = 1 if max(depths) > 1 else 100
    axes.set_yticks(range(len(depths)), [f"{depth * percent:.3g}" for depth in depths])
    axes.set_xlabel("length (tokens)")
    axes.set_ylabel("depth of the needle (%)")
    axes.set_title(f"{title}: {fmean(cells.values()):.1f}", fontsize=10)
    if len(cells) <= _MOST_LABELS:
        for (length, depth), score in cells.items():
            place = (lengths.index(length), depths.index(depth))
            axes.text(*place, f"{score:.0f}", ha="center", va="center", fontsize=7)
    figure.colorbar(image, label="score")
    figure.savefig(path, dpi=150)


def _tokens(length: float) -> str:
    return f"{length / 1000:g}k" if length >= 1000 else f"{length:g}"
