"""What a line looks like, small, beside its name: the colour, marker and dash of the figures as one SVG path."""

from __future__ import annotations

from math import cos, pi, sin

from kvbench.page.charts import dash
from kvbench.report.figures.style import Look

POLYGONS = {"^": (3, 0.0), "v": (3, 180.0), ">": (3, 90.0), "<": (3, -90.0), "D": (4, 0.0), "s": (4, 45.0)}
POLYGONS |= {"p": (5, 0.0), "h": (6, 0.0), "H": (6, 30.0), "8": (8, 22.5), "d": (4, 0.0)}
"""Corners of a marker, and by how many degrees its first one is turned from the top."""
WIDTH, HEIGHT, RADIUS = 26, 12, 5.0


def svg(look: Look) -> str:
    """A short line with its marker."""
    middle = f"{WIDTH / 2:g} {HEIGHT / 2:g}"
    fill = "#fff" if look.hollow else look.colour
    mark = f'<path d="{_path(look.marker)}" transform="translate({middle})" fill="{fill}" stroke="{look.colour}"/>'
    pattern = dash(look).replace("px", "")
    dashed = "" if pattern == "solid" else f' stroke-dasharray="{pattern}"'
    line = f'<path d="M1 {HEIGHT // 2}H{WIDTH - 1}" stroke="{look.colour}" stroke-width="2"{dashed}/>'
    size = f'width="{WIDTH}" height="{HEIGHT}"'
    return f'<svg class="swatch" {size} aria-hidden="true">{line}{mark if look.marker else ""}</svg>'


def _path(marker: str) -> str:
    """The marker around 0, 0; a circle for what has no corners."""
    if marker in POLYGONS:
        corners, turn = POLYGONS[marker]
        return _closed([(RADIUS, turn + 360 * i / corners) for i in range(corners)], 0.6 if marker == "d" else 1.0)
    if marker == "*":
        return _closed([(RADIUS if i % 2 == 0 else RADIUS * 0.42, 36.0 * i) for i in range(10)])
    if marker in ("P", "X"):
        turn = 45.0 if marker == "X" else 0.0
        arm = [(RADIUS, -20.0), (RADIUS, 20.0), (RADIUS * 0.5, 45.0)]
        return _closed([(r, turn + 90 * i + angle) for i in range(4) for r, angle in arm])
    return f"M{-RADIUS:g} 0a{RADIUS:g} {RADIUS:g} 0 1 0 {2 * RADIUS:g} 0a{RADIUS:g} {RADIUS:g} 0 1 0 {-2 * RADIUS:g} 0"


def _closed(corners: list[tuple[float, float]], narrow: float = 1.0) -> str:
    """A polygon of (radius, degrees clockwise from the top)."""
    points = [(narrow * r * sin(pi * a / 180), -r * cos(pi * a / 180)) for r, a in corners]
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points) + "Z"
