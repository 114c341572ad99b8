"""Slugs of stores: `kivi_g32_r128`, `ott_g128_r32_n1`, `zipcache_k0.6_v0.6`; behind an eviction: `cake_kivi_int4`."""

import re
from dataclasses import dataclass
from typing import Any

SETTINGS = {
    "kivi": {"g": "group", "r": "residual", "int": "bits"},
    "ott": {"g": "group", "r": "residual", "n": "outliers", "skip": "skip_layers", "int": "bits"},
    "kcvc": {"g": "group", "r": "residual", "int": "bits"},
    "gear": {"g": "group", "rank": "rank", "int": "bits"},
    "zipcache": {"k": "k", "v": "v", "int": "bits"},
}
"""Stores, and the letters of their settings with the fields they set."""


@dataclass(frozen=True)
class StoreSlug:
    """What a slug says of a store: the eviction in front of it ("" = none), its preset, and the fields it sets."""

    eviction: str
    store: str
    fields: dict[str, Any]


def parse(slug: str) -> StoreSlug | None:
    """The store a slug names, None if it names none; ValueError for a setting that the store does not have."""
    words = slug.split("_")
    place = next((i for i, word in enumerate(words) if word in SETTINGS), None)
    if place is None:
        return None
    store, fields = words[place], {}
    for word in words[place + 1 :]:
        letters, value = _letters_and_value(word)
        if letters not in SETTINGS[store] or value is None:
            allowed = ", ".join(f"{name}... ({field})" for name, field in SETTINGS[store].items())
            raise ValueError(f"policy {slug!r} has no setting {word!r} of {store} (allowed: {allowed})")
        fields[SETTINGS[store][letters]] = value
    return StoreSlug("_".join(words[:place]), store, fields)


def _letters_and_value(word: str) -> tuple[str, Any]:
    """`g32` -> (g, 32), `k0.6` -> (k, 0.6), `skip0-1` -> (skip, [0, 1]), `skipnone` -> (skip, []); else value None."""
    if word == "skipnone":
        return "skip", []
    found = re.fullmatch(r"([a-z]+)(\d+(?:\.\d+)?|\d+(?:-\d+)*)", word)
    if found is None:
        return word, None
    letters, value = found.groups()
    if letters == "skip":
        return letters, [int(layer) for layer in value.split("-")] if "." not in value else None
    if letters in ("k", "v"):
        return letters, float(value) if "-" not in value else None
    return letters, int(value) if value.isdigit() else None
