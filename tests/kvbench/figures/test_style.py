"""Looks of policies, ticks, and labels: what lets a reader tell lines apart."""

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from plotted_runs import sample, write_run

from kvbench.report.figures import panels, score
from kvbench.report.figures.sheet import Paper, shared_end, shared_fields
from kvbench.report.figures.style import DARK_PAPER, HUES, ON_DARK, PAPER, Look, house_style, log_ticks, palette

# Machado et al. 2009, severity 1, on linear RGB
VISION = {
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "normal": np.eye(3).tolist(),
}


def linear(colour: str) -> np.ndarray:
    rgb = np.array(to_rgb(colour))
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def oklab(rgb: np.ndarray) -> np.ndarray:
    """Of linear RGB (B. Ottosson 2020)."""
    lms = [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566]]
    lab = [[0.2104542553, 0.793617785, -0.0040720468], [1.9779984951, -2.428592205, 0.4505937099]]
    lms.append([0.0883024619, 0.2817188376, 0.6299787005])
    lab.append([0.0259040371, 0.7827717662, -0.808675766])
    return np.array(lab) @ np.cbrt(np.array(lms) @ rgb)


def contrast(one: str, other: str) -> float:
    light, dark = sorted((float(linear(c) @ (0.2126, 0.7152, 0.0722)) for c in (one, other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize(("hues", "paper"), [(HUES, PAPER), (ON_DARK, DARK_PAPER)], ids=["light", "dark"])
def test_every_two_colours_differ_for_all_readers_and_from_the_paper(
    vision: str, hues: tuple[str, ...], paper: str
) -> None:
    seen = [oklab(np.clip(np.array(VISION[vision]) @ linear(hue), 0, 1)) for hue in hues]
    assert min(float(np.linalg.norm(a - b)) for a, b in combinations(seen, 2)) > 0.05  # 0.02 is just noticeable
    assert min(contrast(hue, paper) for hue in hues) > 2.1


def test_no_colour_and_no_marker_repeats_and_the_plain_method_is_solid() -> None:
    looks = palette({f"{prefix}family{n}": f"family{n}" for n in range(8) for prefix in ("", "ada_", "caote_")})
    assert len({look.hue for look in looks.values()}) == 24
    assert len({(look.marker, look.hollow) for look in looks.values()}) == 24
    assert all(looks[f"family{n}"].line == "-" != looks[f"ada_family{n}"].line for n in range(8))
    few = palette({"snapkv": "snapkv", "h2o": "h2o"})
    assert {few["snapkv"].hue, few["h2o"].hue} <= set(HUES[:6])


def test_on_dark_paper_colours_are_others_and_the_full_cache_is_white() -> None:
    with house_style(dark=True):
        assert Look(HUES[0], "o", "-", hollow=True).plot["markerfacecolor"] == DARK_PAPER
        assert Look(HUES[0], "o", "-").colour == ON_DARK[0]
        assert palette({"full": "full"})["full"].colour == "#ffffff"
        assert Figure().get_facecolor()[:3] == pytest.approx(to_rgb(DARK_PAPER))
    assert Look(HUES[0], "o", "-").colour == HUES[0]


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ((128, 4096), [200, 500, 1000, 2000]),
        ((0.003, 3), [0.003, 0.01, 0.03, 0.1, 0.3, 1, 3]),
        ((200, 1800), [200, 300, 500, 700, 1000, 1500]),
        ((3.2, 6.3), [3.2, 4, 4.8, 5.6, 6.4]),
        ((1, 10**8), [1, 100, 10**4, 10**6, 10**8]),
    ],
)
def test_logarithmic_ticks_are_round_numbers_among_the_data(ends: tuple[float, float], expected: list[float]) -> None:
    assert log_ticks(*ends) == expected


def test_the_common_end_of_labels_is_said_once() -> None:
    labels = ["full dtype=bfloat16 [unfinished, n=11]", "snapkv(window=16) dtype=bfloat16 [unfinished, n=11]"]
    assert shared_end(labels) == " dtype=bfloat16 [unfinished, n=11]"
    assert Paper(common=shared_end(labels)).name(labels[1]) == "snapkv(window=16)"
    assert shared_end(["h2o seed=1", "tova seed=2"]) == shared_end(["h2o seed=1"]) == shared_end(["h2o", "tova"]) == ""
    assert shared_fields(["niah(length=1)", "vt(length=1)"]) == "(length=1)"
    assert shared_fields(["niah(length=1)", "vt"]) == ""


def test_policies_with_caches_of_one_size_are_drawn_beside_each_other(tmp_path: Path) -> None:
    for policy in ("snapkv", "h2o", "tova"):
        write_run(tmp_path, policy, [sample(i, 1.0) for i in range(3)])
    rows = panels.read(tmp_path)
    ((_, figure),) = score.against_bytes(rows, panels.looks(rows), Paper())
    (axes,) = figure.axes
    x = [line.get_transform().transform((line.get_xdata()[0], 0))[0] for line in axes.get_lines()]
    assert np.diff(sorted(x)).min() > 3
    (low, _), (high, _) = axes.transAxes.transform([(0, 0), (1, 0)])
    assert low < min(x)
    assert max(x) < high
