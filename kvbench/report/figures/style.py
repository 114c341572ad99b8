"""The style of all figures: the style file, and a colour, marker and line style for each policy.

Policies with the same scorer (`snapkv`, `caote_snapkv`, `pyramidkv`) share a hue. Markers and line styles differ too,
so that figures can be read in grey. The hues are distinct for red-green blind readers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any
from zlib import crc32

import matplotlib as mpl
import matplotlib.style  # not imported by `import matplotlib`
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from kvbench.config.presets import policy_config
from kvbench.results.files import atomic_write

HUES = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#7A0019", "#3B2E8C")
"""Six hues of Okabe and Ito (2008), and two dark ones for more families."""
FIRST = 6
MARKERS = "os^DvPX<>phd*H8"
LINES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
INK, FAINT = "#222222", "#6b6b6b"
HEAT = "cividis"
BASELINE = "full"


@contextmanager
def house_style(font: str | None = None, font_size: float | None = None) -> Iterator[None]:
    """A context for drawing and writing figures: matplotlib uses its settings for both.

    font: a family such as "serif" or "Times New Roman". font_size: points of the text; other sizes are relative to it.
    """
    more: dict[Any, Any] = {"font.family": font} if font else {}
    more |= {"font.size": font_size} if font_size else {}
    with mpl.style.context(["default", Path(__file__).with_name("kvbench.mplstyle")]), mpl.rc_context(more):
        yield


@dataclass(frozen=True)
class Look:
    """Colour, marker and line style of a policy."""

    colour: str
    marker: str
    line: Any  # a matplotlib line style
    hollow: bool = False

    @property
    def plot(self) -> dict[str, Any]:
        """Arguments of `Axes.plot`."""
        face = "white" if self.hollow else self.colour
        style = {"marker": self.marker, "markerfacecolor": face, "markeredgecolor": self.colour}
        return {"color": self.colour, "linestyle": self.line, **style}


FULL = Look("#000000", "", (0, (6, 2)))


def palette(families: Mapping[str, str]) -> dict[str, Look]:
    """The look of every policy. families: the family of each policy.

    The hue of a family is chosen by its name; if it is taken, by the next free hue. Within a family the plain method
    has the pure hue, and the others have darker and lighter shades.
    """
    hues: dict[str, str] = {}
    for index, family in enumerate(sorted(set(families.values()) - {BASELINE})):
        first = crc32(family.encode()) % FIRST
        order = [*HUES[first:FIRST], *HUES[:first], *HUES[FIRST:]]
        taken = list(hues.values())[index // len(HUES) * len(HUES) :]
        hues[family] = next(hue for hue in order if hue not in taken)
    ordered = sorted((f, not p.startswith(f), len(p), p) for p, f in families.items() if f != BASELINE)
    looks = {policy: FULL for policy, family in families.items() if family == BASELINE}
    members: dict[str, int] = {}
    for index, (family, _, _, policy) in enumerate(ordered):
        place = members[hues[family]] = members.get(hues[family], -1) + 1
        marker, line = MARKERS[index % len(MARKERS)], LINES[place % len(LINES)]
        looks[policy] = Look(_shade(hues[family], place), marker, line, hollow=index // len(MARKERS) % 2 == 1)
    return looks


def _shade(hue: str, place: int) -> str:
    """The hue itself for place 0, then darker and lighter shades; a dark hue becomes only lighter."""
    if place == 0:
        return hue
    share, own = min(0.22 + 0.12 * place, 0.6), np.array(to_rgb(hue))
    bright = float(own @ (0.2126, 0.7152, 0.0722))
    white = 1.0 if bright < 0.25 or (place == 2 and bright < 0.5) else 0.0
    return to_hex(tuple((1 - share) * own + share * white))


def family(policy: Mapping[str, Any]) -> str:
    """The family of a policy: the class of its scorer, reader, press, pre-pass or store, or `full`.

    policy: its parts, each with "class" (in results) or "_target_" (in presets).
    """
    for part in ("scorer", "reader", "press", "pre_pass", "store"):
        described = policy.get(part) or {}
        name = str(described.get("class", described.get("_target_", ""))).rpartition(".")[2].lower()
        if name and not (part == "store" and name == "dense"):
            return name
    return "kvpress" if "press" in policy else BASELINE


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


def by_factors(axes: Axes, ends: Sequence[float]) -> None:
    """Make the x axis logarithmic, with plain numbers. ends: the smallest and largest value."""
    low, high = ends
    axes.set_xscale("log")
    steps = (1, 2, 5) if high < 200 * low else (1,)
    axes.xaxis.set_major_locator(MaxNLocator(4) if high < 4 * low else LogLocator(10, subs=steps))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


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
