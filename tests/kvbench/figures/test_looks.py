"""Marks and hues by which policies are told apart."""

from __future__ import annotations

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
