"""What a line looks like, small, beside its name: the colour, marker and dash of the figures as one SVG path."""

from __future__ import annotations

import numpy as np
from matplotlib.markers import MarkerStyle

from kvbench.page.charts import dash
from kvbench.report.figures.style import Look

WIDTH, HEIGHT, SIZE = 26, 12, 8.0


def svg(look: Look) -> str:
    """A short line with its marker."""
    fill = "#fff" if look.hollow else look.colour
    place = f'transform="translate({WIDTH / 2:g} {HEIGHT / 2:g})" fill="{fill}" stroke="{look.colour}"'
    mark = f'<path d="{_path(look.marker)}" {place}/>' if look.marker else ""
    pattern = dash(look).replace("px", "")
    dashed = "" if pattern == "solid" else f' stroke-dasharray="{pattern}"'
    line = f'<path d="M1 {HEIGHT // 2}H{WIDTH - 1}" stroke="{look.colour}" stroke-width="2"{dashed}/>'
    return f'<svg class="swatch" width="{WIDTH}" height="{HEIGHT}" aria-hidden="true">{line}{mark}</svg>'


def _path(marker: str) -> str:
    """The outline of a marker around 0, 0."""
    style = MarkerStyle(marker)
    (outline, *_) = style.get_path().transformed(style.get_transform()).to_polygons()
    return "M" + "L".join(f"{SIZE * x:.1f} {-SIZE * y:.1f}" for x, y in np.asarray(outline).tolist()) + "Z"
