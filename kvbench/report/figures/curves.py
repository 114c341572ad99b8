"""What a benchmark's picture is made of; apart from the drawing, so that measuring need not import matplotlib."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Curve:
    """Points of one method in a picture. low, high: the 20th and 80th percentiles of repeated runs, where known."""

    panel: str
    x_label: str
    y_label: str
    method: str
    x: list[float]
    y: list[float]
    low: list[float | None] = field(default_factory=list)
    high: list[float | None] = field(default_factory=list)
