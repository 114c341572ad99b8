"""Draws and writes the figures of finished runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from kvbench.errors import UsageError
from kvbench.report.figures import divergence, evidence, heatmap, layers, nll, score
from kvbench.report.figures.panels import looks
from kvbench.report.figures.sheet import Paper, shared_end, shared_fields
from kvbench.report.figures.style import Look, house_style, save
from kvbench.results.result import Result
from kvbench.terminal.outputs import writing

Figures = list[tuple[str, Figure]]  # names of files and figures

log = logging.getLogger(__name__)

_KL = "divergence from full (task.divergence=true)"
_DRAW: Mapping[str, tuple[Callable[[Sequence[Result], Mapping[str, Look], Paper], Figures], str]] = {
    "budget": (score.against_budget, "no run has both a budget and a score"),
    "bytes": (score.against_bytes, "no policy except the full cache has both a score and bytes"),
    "heatmap": (heatmap.needle_maps, "no run has examples at several depths"),
    "nll": (nll.curves, "no run has scored given texts (task=perplexity, pg19 or booksum)"),
    "kl": (divergence.against_budget, f"no run has both a budget and a {_KL}"),
    "kl_bytes": (divergence.against_bytes, f"no policy except the full cache has both bytes and a {_KL}"),
    "kl_position": (divergence.against_position, f"no run with a budget has samples with a {_KL}"),
    "evidence": (evidence.failures, "no run with a score knows where the evidence is in its prompts"),
    "layers": (layers.layer_budgets, "no policy has different budgets for its layers"),
}
ALL = "all"


def figures(kind: str, rows: Sequence[Result], paper: Paper) -> Figures:
    """The figures of one kind, or of all kinds with data; at least one, or UsageError. Call it inside `house_style`."""
    found: Figures = []
    palette = looks(rows)
    common = shared_end(row.line for row in rows)
    paper = replace(paper, common=common, fields=shared_fields(row.task_label for row in rows))
    for name in _DRAW if kind == ALL else (kind,):
        make, needs = _DRAW[name]
        drawn = make(rows, palette, paper)
        found += drawn
        if not drawn and kind != ALL:
            raise UsageError(f"--kind {kind} has nothing to draw: {needs}")
        if not drawn:
            log.info("no figure %s: %s", name, needs)
    if not found:
        raise UsageError(
            "there is nothing to draw: no run has a score, has scored given texts or was compared with full"
        )
    return found


def draw(
    kind: str, rows: Sequence[Result], output: Path, suffix: str = ".svg", paper: Paper | None = None
) -> list[Path]:
    """Write the figures of one kind, or all that have data, and return their paths.

    output: one file, or a folder. Raises UsageError if there is nothing to draw, if there are several figures for one
    file, or if a file cannot be written.
    """
    paper = paper or Paper()
    with house_style(paper.font, paper.font_size):
        found = figures(kind, rows, paper)
        names = ["".join(c if c.isalnum() or c in "._-=," else "_" for c in name) for name, _ in found]
        if output.suffix and len(found) > 1:
            raise UsageError(
                f"-o {output} is one file, but there are {len(found)} figures ({', '.join(names)}): name a folder, or "
                "choose with --task, --model, --budget"
            )
        paths = [output] if output.suffix else [output / f"{name}{suffix}" for name in names]
        with writing(output):
            for path, (_, figure) in zip(paths, found, strict=True):
                path.parent.mkdir(parents=True, exist_ok=True)
                save(figure, path)
    return paths
