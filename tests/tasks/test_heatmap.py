from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from kvbench.tasks.heatmap import COLOURS, cells_of_answers, draw


@dataclass(frozen=True)
class Answer:
    """What a run keeps of an example."""

    score: float | None
    metadata: dict[str, Any] = field(default_factory=dict)
    references: tuple[str, ...] = ()
    output: str | None = ""


def share(path: Path, colour: str) -> float:
    """Share of the pixels of a picture that have a colour."""
    wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
    pixels = np.asarray(imread(path))[..., :3] * 255
    return float((np.abs(pixels - wanted).max(-1) < 3).mean())


def test_cells_are_mean_percents_by_length_and_depth() -> None:
    run = [Answer(score, {"length": 1000, "depth": depth}) for score, depth in ((1.0, 0.5), (0.0, 0.5), (1.0, 1.0))]
    run += [Answer(None, {"length": 1000, "depth": 0.0}), Answer(1.0, {"length": 1000})]
    assert cells_of_answers(run) == {(1000, 0.5): 50.0, (1000, 1.0): 100.0}


def test_a_picture_is_coloured_by_its_scores(tmp_path: Path) -> None:
    cells = {(length, depth): 100.0 for length in (1000, 2000) for depth in (0, 50, 100)}
    draw(cells, tmp_path / "found.png", "all found")
    draw(dict.fromkeys(cells, 0.0), tmp_path / "missed.png", "all missed")
    missed, _, found = COLOURS
    assert share(tmp_path / "found.png", found) > 0.3 > share(tmp_path / "found.png", missed)
    assert share(tmp_path / "missed.png", missed) > 0.3 > share(tmp_path / "missed.png", found)


def test_nothing_to_draw_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run: there is no cell to draw"):
        draw({}, tmp_path / "none.png", "run")
