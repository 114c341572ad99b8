"""Which pictures there are, and how they are written."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from kvbench.analysis.result import Result
from kvbench.report.figures import bench, heatmap, nll, pareto, score, tasks
from kvbench.report.figures.panels import looks
from kvbench.report.figures.sheet import Paper
from kvbench.report.figures.style import FORMATS, Look, house_style, save
from kvbench.terminal.errors import UsageError

Pictures = list[tuple[str, Figure]]  # each with the name its file has

log = logging.getLogger(__name__)


def _nll(cells: Sequence[Result], _: Mapping[str, Look], paper: Paper) -> Pictures:
    return [("nll", nll.curves(cells, paper))] if nll.read_runs(cells) else []


_DRAW: Mapping[str, tuple[Callable[[Sequence[Result], Mapping[str, Look], Paper], Pictures], str]] = {
    "budget": (score.against_budget, "no run has both a budget and a score"),
    "bytes": (score.against_bytes, "no policy beside the full cache has both a score and its bytes"),
    "tasks": (tasks.by_task, "bars by task need two tasks or more at one budget"),
    "heatmap": (heatmap.needle_maps, "no run on disk has examples at several depths"),
    "pareto": (pareto.pareto, "a front needs two cells of one task with a score and bytes"),
    "nll": (_nll, "no run on disk has scored given texts (task=perplexity, pg19 or booksum)"),
}
KINDS = tuple(_DRAW)
BENCH, ALL = "bench", "all"


def draw(
    kind: str, cells: Sequence[Result], output: Path, suffix: str = ".svg", paper: Paper | None = None
) -> list[Path]:
    """Write the pictures of one kind, or of all there is data for, and return their paths.

    output: one file, or a folder for files named after the pictures. Raises UsageError where there is nothing to draw,
    where one file would have to hold several pictures, or where it cannot be written.
    """
    pictures: Pictures = []
    with house_style():
        palette = looks(cells)
        for name in KINDS if kind == ALL else (kind,):
            make, needs = _DRAW[name]
            found = make(cells, palette, paper or Paper())
            pictures += found
            if not found and kind != ALL:
                raise UsageError(f"--kind {kind} has nothing to draw: {needs}")
            if not found:
                log.info("no picture %s: %s", name, needs)
        if not pictures:
            raise UsageError("there is nothing to draw: no run has a score or has scored given texts")
        return write(pictures, output, suffix)


def draw_bench(files: Sequence[Path], output: Path, suffix: str, paper: Paper) -> list[Path]:
    """Write the pictures of finished benchmarks, from what `python -m kvbench.bench` left. Raises UsageError."""
    with house_style():
        return write([(path.stem, bench.of_file(path, paper)) for path in files], output, suffix)


def write(pictures: Pictures, output: Path, suffix: str) -> list[Path]:
    """Write pictures into one file or a folder; inside the house style. Raises UsageError."""
    if output.suffix:
        if output.suffix not in FORMATS:
            raise UsageError(f"-o {output} must be a folder or end in one of {', '.join(FORMATS)}")
        if len(pictures) > 1:
            names = ", ".join(name for name, _ in pictures)
            raise UsageError(
                f"-o {output} is one file, but there are {len(pictures)} pictures ({names}): name a folder, or choose "
                "with --task, --model, --budget"
            )
    try:
        paths = [output] if output.suffix else [_inside(output, name, suffix) for name, _ in pictures]
        for path, (_, figure) in zip(paths, pictures, strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            save(figure, path)
    except OSError as error:
        raise UsageError(f"-o {output} cannot be written ({error.strerror or error})") from error
    return paths


def _inside(folder: Path, name: str, suffix: str) -> Path:
    safe = "".join(c if c.isalnum() or c in "._-=," else "_" for c in name)
    return folder / f"{safe}{suffix}"
