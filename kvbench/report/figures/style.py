"""How every picture of kvbench looks: colours, markers, type, and files that are the same each time.

A policy has its own marker and line style everywhere, so that a picture can be read in grey; policies that score tokens
alike (`snapkv`, `caote_snapkv`, `pyramidkv`) share a hue. The hues are told apart with red-green blindness too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import matplotlib as mpl
import matplotlib.style  # `mpl.style` is a module of its own
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvbench.config.presets import policy_config

FORMATS = (".svg", ".png", ".pdf")
HUES = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#7A0019", "#3B2E8C")
"""Six of Okabe and Ito (2008); for more families, two dark ones as far from them as they are from each other."""
FIRST = 6
MARKERS = "os^DvPX<>phd*H8"
LINES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
INK, FAINT, GRID = "#222222", "#6b6b6b", "#dddddd"
HEAT = "cividis"  # from dark to light without a step back: it can be printed in grey
BASELINE = "full"
DPI = 150  # of PNGs: text is measured as it will be drawn

_RC: dict[Any, Any] = {
    "svg.hashsalt": "kvbench",
    "svg.fonttype": "none",  # text that can be searched and edited
    "pdf.fonttype": 42,  # TrueType, which journals ask for
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.5,
    "lines.markersize": 5,
    "figure.facecolor": "white",
    "image.cmap": HEAT,
    "figure.dpi": DPI,
}


@contextmanager
def house_style() -> Iterator[None]:
    """Make and write figures inside it: matplotlib reads the settings at both."""
    with mpl.style.context("default"), mpl.rc_context(_RC):
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
        return {"color": self.colour, "linestyle": self.line, **self.points}

    @property
    def points(self) -> dict[str, Any]:
        """Arguments of `Axes.plot` for the markers alone."""
        face = "white" if self.hollow else self.colour
        return {"marker": self.marker, "markerfacecolor": face, "markeredgecolor": self.colour}


FULL = Look("#000000", "", (0, (6, 2)))


def palette(families: Mapping[str, str]) -> dict[str, Look]:
    """The look of every policy, from its family. families: by policy.

    A family takes the hue of its name where that is free, else the next free one; only beyond eight do some share one.
    Of those that share a hue the first has it pure, which in a family is the plain method, the others are darker and
    lighter.
    """
    hues = _hues(sorted(set(families.values()) - {BASELINE}))
    ordered = sorted((f, not p.startswith(f), len(p), p) for p, f in families.items() if f != BASELINE)
    looks = {policy: FULL for policy, family in families.items() if family == BASELINE}
    members: dict[str, int] = {}
    for index, (family, _, _, policy) in enumerate(ordered):
        hue = hues[family]
        place = members[hue] = members.get(hue, -1) + 1
        marker, line = MARKERS[index % len(MARKERS)], LINES[place % len(LINES)]
        looks[policy] = Look(_shade(hue, place), marker, line, hollow=index // len(MARKERS) % 2 == 1)
    return looks


def _hues(families: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for index, family in enumerate(families):
        wanted = crc32(family.encode()) % FIRST
        order = [*HUES[wanted:FIRST], *HUES[:wanted], *HUES[FIRST:]]
        taken = list(found.values())[index // len(HUES) * len(HUES) :]
        found[family] = next(hue for hue in order if hue not in taken)
    return found


def _shade(hue: str, place: int) -> str:
    """The hue itself, then darker and once lighter; a light hue only darker, a dark one only lighter."""
    if place == 0:
        return hue
    share, own = min(0.22 + 0.12 * place, 0.6), np.array(to_rgb(hue))
    bright = float(own @ (0.2126, 0.7152, 0.0722))
    white = 1.0 if bright < 0.25 or (place == 2 and bright < 0.5) else 0.0
    return to_hex(tuple((1 - share) * own + share * white))


def family(policy: Mapping[str, Any]) -> str:
    """The family of a policy, which has one hue: its scorer, reader, press or pre-pass, else its store; else `full`.

    policy: its parts, each with "class" (as runs describe them) or "_target_" (as presets do).
    """
    for part in ("scorer", "reader", "press", "pre_pass", "filter", "store"):  # older runs say filter
        described = policy.get(part) or {}
        name = str(described.get("class", described.get("_target_", ""))).rpartition(".")[2].lower()
        if name and not (part == "store" and name == "dense"):
            return name
    return "kvpress" if "press" in policy else BASELINE


def family_of(slug: str) -> str:
    """The family of a policy known by name only; for other names the part before the first underscore."""
    try:
        return family(policy_config(slug))
    except ValueError:
        return slug.partition("_")[0]


def looks_of(slugs: Sequence[str]) -> dict[str, Look]:
    """The palette of policies known by name only."""
    return palette({slug: family_of(slug) for slug in slugs})


def by_layer(axes: Axes) -> None:
    """Make the x axis one of layers."""
    axes.set_xlabel("layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def legend_below(figure: Figure, axes: Axes) -> None:
    """One legend below all panels, made from the lines of one of them."""
    handles, labels = axes.get_legend_handles_labels()
    columns = max(1, min(len(labels), 6, 90 // (8 + max(map(len, labels), default=0))))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, handlelength=3)


def byte_unit(largest: float) -> tuple[str, int]:
    """A unit that suits a number of bytes, and its size in bytes."""
    names = ("bytes", "KiB", "MiB", "GiB", "TiB")
    power = next((p for p in range(len(names) - 1, 0, -1) if largest >= 2 * 2 ** (10 * p)), 0)
    return names[power], 2 ** (10 * power)


def save(figure: Figure, path: Path) -> None:
    """Write a figure in the format of its suffix, inside the style; drawn again it has the same bytes. OSError."""
    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {"Software": None}}
    figure.savefig(path, dpi=DPI, metadata=metadata[path.suffix])
