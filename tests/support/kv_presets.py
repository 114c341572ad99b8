"""Presets for laws that hold of all of them: a new file in conf/policy/ is among them by being there."""

from functools import cache
from typing import Any

from kvbench import make_policy
from kvbench.config.compose import read_all
from kvbench.config.presets import store_of

BUDGET = 40
PRESETS = read_all("policy")


def _complete(value: object) -> bool:
    """Whether no field of a configuration is left to be named, such as a file."""
    return all(map(_complete, value.values())) if isinstance(value, dict) else value != ""


INCOMPLETE = ("kvpress", *(slug for slug, config in PRESETS.items() if not _complete(config)))
"""Presets that need a field: a file of importances or of filters, a press."""


def stores() -> list[str]:
    """Presets that keep every token, in a store of their own."""
    return [slug for slug in PRESETS if store_of(slug)]


@cache
def evicting() -> list[str]:
    """Presets that evict tokens from a cache to a budget.

    GemFilter rewrites the prompt instead; the released D2O never compresses three layers; what protects the prompt
    takes none beyond the budget; what also reads less than it holds has a budget of its own for what it holds; two set
    their budget by themselves; FINCH in chunks takes no padding; VaSE's window is longer than the budget; whole pages
    round it; what reads a file, HeadKV aside, is given none here. They have tests of their own.
    """
    out = {
        "d2o_released",
        "duoattention",
        "finch_chunks",
        "pagedeviction",
        "simlayerkv",
        "vase",
        *protecting(),
        *reading(),
    }
    out |= {slug for slug in INCOMPLETE if not slug.startswith("headkv")}
    return [slug for slug, config in PRESETS.items() if config.get("scorer") and slug not in out]


@cache
def reading() -> list[str]:
    """Presets that read some of the tokens that they hold."""
    return [slug for slug, config in PRESETS.items() if config.get("reader")]


@cache
def protecting() -> list[str]:
    """Presets that keep all of a prompt, inside the budget."""
    return [slug for slug, config in PRESETS.items() if (config.get("schedule") or {}).get("protect") == "prompt"]


@cache
def kinds() -> list[str]:
    """One evicting preset for every combination of parts; the others differ from it in numbers only."""
    first: dict[tuple[type, ...], str] = {}
    for slug in evicting():
        if not slug.startswith(INCOMPLETE):
            policy = make_policy(slug, BUDGET)
            parts = (policy.scorer, policy.value, policy.allocator, policy.merger, policy.store, policy.schedule)
            first.setdefault(tuple(type(part) for part in parts), slug)
    return sorted(first.values())


COMPOSED: dict[str, dict[str, Any]] = {
    "ada_compactor": {},
    "ada_critical_lagkv": {},
    "ada_expected_attention": {},
    "caote_cake": {},
    "caote_expected_attention": {},
    "caote_keydiff": {},
    "chunkkv_ada_snapkv": {"heads": "own", "every": 2, "decode": "evict"},
    "chunkkv_caote_h2o": {},
    "critical_expected_attention": {},
    "critical_h2o": {},
    "critical_leverage": {},
    "p2a_snapkv": {"window": 8},
    "vase": {"window": 8, "every": 8},
}
"""Wrappers before scorers that ask for the model's layer, remember or select chunks, and fields that are no preset."""

SMALL_GROUPS: dict[str, dict[str, Any]] = {
    "kivi": {"group": 8, "residual": 16},
    "ott": {"group": 8, "residual": 5, "auxiliary": 4, "skip_layers": [0]},
    "kcvc": {"group": 8, "residual": 8},
    "gear": {"group": 8, "gap": 12},
    "zipcache": {"gap": 12},
}
STORES = {name: SMALL_GROUPS.get(name, {}) for name in stores()} | {"nvfp4": {"group": 8}}
"""Stores with groups that short prompts fill."""
