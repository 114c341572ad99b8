"""What a benchmark's picture is made of; apart from the drawing, so that measuring need not import matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


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


@dataclass(frozen=True)
class Dot:
    """A figure of one method, above 0. low, high: the 20th and 80th percentiles of repeated runs, where known."""

    method: str
    x: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class ChartRow:
    """A row of a chart. words: the text beside it; bound: the value that it has to reach, if any."""

    label: str
    dots: list[Dot]
    words: str = ""
    bound: float | None = None


@dataclass(frozen=True)
class ChartGroup:
    """Rows under one title."""

    title: str
    rows: list[ChartRow]


@dataclass(frozen=True)
class Chart:
    """Named rows of dots over one axis by factors, with a line at 1. percent: its numbers are shares."""

    x_label: str
    groups: list[ChartGroup]
    notes: list[str] = field(default_factory=list)
    percent: bool = False


Picture = Sequence[Curve] | Chart


def as_json(picture: Picture) -> dict[str, Any]:
    """A picture as fields of a benchmark's file."""
    if isinstance(picture, Chart):
        return {"curves": [], "chart": asdict(picture)}
    return {"curves": [asdict(curve) for curve in picture]}


def of_json(content: Mapping[str, Any]) -> Picture:
    """The picture in a benchmark's file. KeyError or TypeError where it has none."""
    if "chart" not in content:
        return [Curve(**curve) for curve in content["curves"]]
    return Chart(**{**content["chart"], "groups": [_group(**group) for group in content["chart"]["groups"]]})


def _group(title: str, rows: Sequence[Mapping[str, Any]]) -> ChartGroup:
    return ChartGroup(title, [ChartRow(**{**row, "dots": [Dot(**dot) for dot in row["dots"]]}) for row in rows])
