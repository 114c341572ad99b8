"""Presets for laws that hold of all of them: a new file in conf/policy/ is among them by being there."""

from functools import cache

from kvbench import make_policy, preset_names

BUDGET = 40


@cache
def evicting() -> list[str]:
    """Presets that evict tokens from a cache to a budget.

    GemFilter rewrites the prompt instead; the released D2O never compresses three layers. Both have tests of their own.
    """
    nothing = {"full", "gemfilter", "gear", "kcvc", "kivi", "ott", "zipcache"}
    return [slug for slug in preset_names() if slug not in {*nothing, "d2o_released"}]


@cache
def kinds() -> list[str]:
    """One evicting preset for every combination of parts; the others differ from it in numbers only."""
    first: dict[tuple[type, ...], str] = {}
    for slug in evicting():
        if not slug.startswith("headkv"):  # it needs a file
            policy = make_policy(slug, BUDGET)
            parts = (policy.scorer, policy.value, policy.allocator, policy.merger, policy.store, policy.schedule)
            first.setdefault(tuple(type(part) for part in parts), slug)
    return sorted(first.values())
