"""Slugs of stores: the published ones build what they say, others are refused with what is allowed."""

import csv
from pathlib import Path
from typing import Any

import pytest

from kvbench import make_policy, preset_names
from kvbench.config.presets import policy_config
from kvbench.config.slugs import parse
from kvbench.policies.stores.gear import Gear
from kvbench.policies.stores.kcvc import Kcvc
from kvbench.policies.stores.kivi import Kivi
from kvbench.policies.stores.ott import Ott
from kvbench.policies.stores.store import Store
from kvbench.policies.stores.zipcache import ZipCache

TABLES = Path(__file__).resolve().parents[3] / "shared" / "paper_tables" / "ott"


@pytest.mark.parametrize(
    ("slug", "store"),
    [
        ("kivi", Kivi(bits=2, group=128, residual=128)),
        ("kivi_g32_r128", Kivi(group=32, residual=128)),
        ("kivi_int4", Kivi(bits=4)),
        ("ott", Ott(bits=2, group=128, residual=32, outliers=3, auxiliary=32, skip_layers=(0, 1))),
        ("ott_g32_r0", Ott(group=32, residual=0)),
        ("ott_g128_r32_n1", Ott(outliers=1)),
        ("ott_g128_r32_skip0", Ott(skip_layers=(0,))),
        ("ott_g128_r32_skip0-3", Ott(skip_layers=(0, 3))),
        ("ott_g128_r32_skipnone", Ott(skip_layers=())),
        ("kcvc_g32_r128", Kcvc(group=32, residual=128)),
        ("gear_g128_rank2", Gear(group=128, rank=2)),
        ("zipcache_k0.7_v0.8", ZipCache(k=0.7, v=0.8)),
    ],
)
def test_a_slug_says_its_stores_settings(slug: str, store: Store) -> None:
    policy = make_policy(slug)
    assert policy.store == store
    assert policy.name == slug
    assert not policy.evicts


@pytest.mark.parametrize(
    ("slug", "sentence"),
    [
        ("kivi_q3", r"'kivi_q3' has no setting 'q3' of kivi \(allowed: g... \(group\), r... \(residual\)"),
        ("kivi_ott", "has no setting 'ott' of kivi"),
        ("full_kivi", "would store what 'full' keeps, but that evicts nothing"),
        ("snapkw_kivi", "policy 'snapkw' does not exist; did you mean snapkv"),
        ("kivi_g32_r100", "residual=100 must be 0 or a multiple of group=32"),
    ],
)
def test_what_a_slug_cannot_mean_is_refused_in_one_sentence(slug: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make_policy(slug, budget=64)


def test_every_store_has_a_preset_whose_fields_its_slug_sets() -> None:
    stores = [name for name in preset_names() if parse(name)]
    assert {"kivi", "ott", "kcvc", "gear", "zipcache"} <= set(stores)
    for name in stores:
        config: dict[str, Any] = policy_config(name)
        store = make_policy(name).store
        assert set(store.slug_letters.values()) <= {*vars(store)}
        assert config["name"] == name


@pytest.mark.skipif(not TABLES.is_dir(), reason="the published tables are not beside this checkout")
def test_every_method_of_the_published_tables_builds() -> None:
    slugs = set()
    for path in TABLES.glob("*.csv"):
        with path.open(encoding="utf-8") as file:
            slugs |= {row["method"] for row in csv.DictReader(file) if "method" in row}
    stores = {slug for slug in slugs if parse(slug.split("_")[0]) and "unlabelled" not in slug}
    assert len(stores) > 30
    for slug in stores:
        make_policy(slug)
