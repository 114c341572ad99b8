"""Marks and hues by which policies are told apart."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from plotted_runs import POLICIES

from kvbench.report.figures import style


def test_the_family_is_that_of_the_scorer_whatever_is_around_it() -> None:
    families = [style.family_of(slug) for slug in ("snapkv", "caote_snapkv", "fastcaote_snapkv", "ada_pyramidkv")]
    assert set(families) == {"snapkv"}
    assert style.family_of("fastcaote_h2o") == style.family_of("p2a_h2o") == "h2o"
    assert [style.family_of(slug) for slug in ("kivi_g32_r128", "cake_kivi_int4", "full")] == ["kivi", "cake", "full"]
    assert style.family_of("quanto_int2") == "quanto", "a rival is its own"


def test_policies_are_told_apart_without_colour() -> None:
    looks = style.palette({name: style.family(parts) for name, parts in POLICIES.items()})
    assert len({(look.marker, look.hollow) for look in looks.values()}) == len(POLICIES)
    assert len({look.colour for look in looks.values()}) == len(POLICIES)
    assert looks["snapkv"].colour in style.HUES


# Machado, Oliveira and Fernandes 2009: what a full lack of one kind of cone makes of linear RGB.
CONES = {
    "all": np.eye(3),
    "no M": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "no L": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
}


def lab(linear: np.ndarray) -> np.ndarray:
    """CIE L*a*b* (D65) of linear RGB."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    ratio = to_xyz @ np.clip(linear, 0, 1) / np.array([0.9505, 1.0, 1.089])
    x, y, z = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("cones", CONES)
def test_hues_are_told_apart_by_the_colour_blind(cones: str) -> None:
    """A difference of 2.3 can just be noticed (Mahy et al. 1994); the least of these is 17."""
    hues = [np.array(to_rgb(hue)) for hue in style.HUES]
    linear = [np.where(hue <= 0.04045, hue / 12.92, ((hue + 0.055) / 1.055) ** 2.4) for hue in hues]
    seen = [lab(np.array(CONES[cones]) @ colour) for colour in linear]
    assert min(float(np.linalg.norm(a - b)) for a, b in combinations(seen, 2)) > 15
