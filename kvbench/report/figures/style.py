"""The style of all figures: the style file, and a colour, marker and line style for each policy.

No two of 24 policies have the same colour, and none of 30 the same marker, so that figures can be read in grey.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from io import BytesIO
from math import log10
from pathlib import Path
from typing import Any
from zlib import crc32

import matplotlib as mpl
import matplotlib.style  # not imported by `import matplotlib`
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from matplotlib.transforms import ScaledTranslation, Transform

from kvbench.config.documentation import DECISIONS
from kvbench.config.presets import policy_config
from kvbench.results.files import atomic_write
from kvbench.results.labels import POLICY

HUES = (
    *("#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#99005C", "#7A00FF", "#0000C2", "#3D4700"),
    *("#8F7AFF", "#5C0085", "#855C3D", "#CC14A3", "#005270", "#FF3D70", "#4747CC", "#705C85", "#FF7AD6", "#7AB899"),
    *("#661F3D", "#D60047", "#EB33EB", "#8F0099"),
)
"""Six hues of Okabe and Ito (2008). Each other one is the colour with the largest smallest distance (OKLab) to those
before it, for normal vision and for simulated protanopia and deuteranopia (Machado et al. 2009), of all colours with a
contrast of 2.3 to 12 to white."""
ON_DARK = (
    *("#4FA3DC", "#F07C2C", "#22BE91", "#F0B93C", "#A5D8F6", "#E39CC3", "#A300CC", "#666600", "#E00066", "#8F6699"),
    *("#7A66FF", "#A3FF00", "#FF66FF", "#00F5A3", "#AD7014", "#3D7070", "#E066B8", "#708F8F", "#FF5266", "#A3CC7A"),
    *("#D61FE0", "#A35247", "#3DAD00", "#CC0A14"),
)
"""The same hues, and colours chosen in the same way, for dark paper: contrast of 3 to 15 to it."""
FIRST = 6
MARKERS = "os^DvPX<>phd*H8"
LINES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
INK, FAINT = "#222222", "#6b6b6b"
PAPER, DARK_PAPER = "#ffffff", "#16181c"
HEAT = "cividis"
BASELINE = "full"
_SHOWN = {**dict(zip(HUES, ON_DARK, strict=True)), "#000000": "#ffffff", INK: "#e2e4e7", FAINT: "#a3a9b1"}
_SHOWN |= {PAPER: DARK_PAPER}
_DARK: ContextVar[bool] = ContextVar("dark", default=False)


@contextmanager
def house_style(font: str | None = None, font_size: float | None = None, dark: bool = False) -> Iterator[None]:
    """A context for drawing and writing figures: matplotlib uses its settings for both.

    font: a family such as "serif" or "Times New Roman". font_size: points of the text; other sizes are relative to it.
    dark: light lines and words on dark paper.
    """
    more: dict[Any, Any] = {"font.family": font} if font else {}
    more |= {"font.size": font_size} if font_size else {}
    token = _DARK.set(dark)
    if dark:
        words = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), shown(INK))
        edges = dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), shown(FAINT))
        paper = dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), DARK_PAPER)
        more |= {**words, **edges, **paper, "grid.color": "#3a3f46"}
    try:
        with mpl.style.context(["default", Path(__file__).with_name("kvbench.mplstyle")]), mpl.rc_context(more):
            yield
    finally:
        _DARK.reset(token)


def shown(colour: str) -> str:
    """A colour of this module; inside `house_style(dark=True)` the one that replaces it on dark paper."""
    return _SHOWN[colour] if _DARK.get() else colour


@dataclass(frozen=True)
class Look:
    """Colour (of this module), marker and line style of a policy."""

    hue: str
    marker: str
    line: Any  # a matplotlib line style
    hollow: bool = False

    @property
    def colour(self) -> str:
        """The colour on the paper of the figure that is drawn."""
        return shown(self.hue)

    @property
    def plot(self) -> dict[str, Any]:
        """Arguments of `Axes.plot`."""
        face = shown(PAPER) if self.hollow else self.colour
        style = {"marker": self.marker, "markerfacecolor": face, "markeredgecolor": self.colour}
        return {"color": self.colour, "linestyle": self.line, **style}


FULL = Look("#000000", "", (0, (6, 2)))


def palette(families: Mapping[str, str]) -> dict[str, Look]:
    """The look of every policy. families: the family of each policy.

    Colours and markers are chosen by the order of the families and, among the first six colours, by the policy's name,
    so that it mostly has the same colour in other figures. The plain method of a family has a solid line.
    """
    ordered = sorted((f, not p.startswith(f), len(p), p) for p, f in families.items() if f != BASELINE)
    looks = {policy: FULL for policy, family in families.items() if family == BASELINE}
    taken: list[str] = []
    members: dict[str, int] = {}
    for index, (family, _, _, policy) in enumerate(ordered):
        first = crc32(policy.encode()) % FIRST
        order = [*HUES[first:FIRST], *HUES[:first], *HUES[FIRST:]]
        taken = [] if len(taken) == len(HUES) else taken
        taken.append(next(hue for hue in order if hue not in taken))
        place = members[family] = members.get(family, -1) + 1
        marker, line = MARKERS[index % len(MARKERS)], LINES[place % len(LINES)]
        looks[policy] = Look(taken[-1], marker, line, hollow=index // len(MARKERS) % 2 == 1)
    return looks


def family(policy: Mapping[str, Any]) -> str:
    """The family of a policy: the class of its scorer, reader, a part of another package, pre-pass or store, or `full`.

    policy: its parts, each with "class" (in results) or "_target_" (in presets).
    """
    others = [name for name in policy if name not in (*DECISIONS, "schedule") and isinstance(policy[name], Mapping)]
    for part in ("scorer", "reader", *others, "pre_pass", "store"):
        described = policy.get(part)
        if not isinstance(described, Mapping):  # none, or a damaged result
            continue
        name = str(described.get("class", described.get("_target_", ""))).rpartition(".")[2].lower()
        if name and not (part == "store" and name == "dense"):
            return name
    own = str(policy.get("class", policy.get("_target_", POLICY)))
    return BASELINE if own.split(".")[-1] == "Policy" else own.rpartition(".")[2].lower()


def looks_of(slugs: Sequence[str]) -> dict[str, Look]:
    """The looks of presets; the family of an unknown name is the part before its first underscore."""
    families = {}
    for slug in slugs:
        try:
            families[slug] = family(policy_config(slug))
        except ValueError:
            families[slug] = slug.partition("_")[0]
    return palette(families)


def by_layer(axes: Axes) -> None:
    """Format the x axis for layer indices."""
    axes.set_xlabel("layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


_STEPS = ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9))


def by_factors(axes: Axes, ends: Sequence[float], which: str = "x", whole: bool = False) -> None:
    """Make the x (or y) axis logarithmic, with plain numbers near the data. ends: the smallest and largest value.

    whole: the axis counts something, so that only whole numbers are marked.
    """
    axis = axes.xaxis if which == "x" else axes.yaxis
    getattr(axes, f"set_{which}scale")("log")
    axis.set_major_locator(FixedLocator(log_ticks(min(ends), max(ends), whole)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def log_ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """At least four round numbers from `low` to `high`; evenly spaced ones in a narrow range. whole: no fractions."""
    powers = range(int(np.floor(log10(low))) - 1, int(np.ceil(log10(high))) + 2)
    for steps in _STEPS:
        ticks = [step * 10.0**power for power in powers for step in steps]
        ticks = [float(f"{tick:.6g}") for tick in ticks if low / 1.05 <= tick <= 1.05 * high]
        ticks = [tick for tick in ticks if tick.is_integer()] if whole else ticks
        if len(ticks) >= 4:
            return ticks[:: -(-len(ticks) // 8)]
    locator = MaxNLocator(5, integer=whole)
    return [float(f"{tick:.6g}") for tick in locator.tick_values(low, high) if tick > 0]


def legend_below(figure: Figure, axes: Axes) -> None:
    """One legend below all panels, from the lines of one panel."""
    handles, labels = axes.get_legend_handles_labels()
    columns = max(1, min(len(labels), 6, 90 // (8 + max(map(len, labels), default=0))))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, handlelength=3)


def side_by_side(lines: int, room: float) -> list[float]:
    """Horizontal offsets of lines in points, so that equal scores do not hide each other's markers and intervals.

    room: points between two budgets; the lines of a budget take a quarter of it at most, which keeps budgets apart.
    """
    step = min(4.0, room / 4 / max(lines - 1, 1))
    return [step * (place - (lines - 1) / 2) for place in range(lines)]


def shifted(axes: Axes, points: float, which: str = "x") -> Transform:
    """The transform of data that is drawn `points` to the right (or, for y, upwards) of its place."""
    right, up = (points / 72, 0.0) if which == "x" else (0.0, points / 72)
    figure = axes.get_figure(root=True)
    assert figure is not None
    return axes.transData + ScaledTranslation(right, up, figure.dpi_scale_trans)


def with_intervals(
    axes: Axes,
    x: Sequence[float],
    y: Sequence[float],
    ends: tuple[Sequence[float], Sequence[float]],
    look: Mapping[str, Any],
    shift: float = 0.0,
    of: str = "y",
) -> None:
    """A line or points with intervals of y (or x). ends: lower and upper ends; NaN: no interval. look: arguments of
    `Axes.plot`, such as `Look.plot` and a label. shift: points to the right, or downwards (`side_by_side`).
    """
    place = shifted(axes, shift) if of == "y" else shifted(axes, -shift, "y")
    lines, at = (axes.vlines, x) if of == "y" else (axes.hlines, y)
    lines(at, *ends, colors=look["color"], linewidth=0.9, alpha=0.5, transform=place)
    axes.plot(x, y, transform=place, **{"zorder": 3, **look})
    for corner in ((x, y), *((x, end) if of == "y" else (end, y) for end in ends)):
        axes.update_datalim(np.column_stack(corner))  # matplotlib leaves out what is shifted
    axes.autoscale_view()


def byte_unit(largest: float) -> tuple[str, int]:
    """A suitable unit for a number of bytes, and its size in bytes."""
    names = ("bytes", "KiB", "MiB", "GiB", "TiB")
    power = next((p for p in range(len(names) - 1, 0, -1) if largest >= 2 * 2 ** (10 * p)), 0)
    return names[power], 2 ** (10 * power)


def save(figure: Figure, path: Path) -> None:
    """Write a figure atomically in the format of the suffix; equal figures give equal bytes.

    Call it inside `house_style`. Raises OSError.
    """
    with atomic_write(path) as temporary:
        temporary.write_bytes(encoded(figure, path.suffix))


def encoded(figure: Figure, suffix: str) -> bytes:
    """The bytes of a figure in the format of `suffix`. Call it inside `house_style`."""
    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {"Software": None}}
    buffer = BytesIO()
    figure.savefig(buffer, format=suffix[1:], metadata=metadata[suffix])
    return buffer.getvalue()
