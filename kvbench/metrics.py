"""From samples to the numbers of a table: everything in `metrics.json` is computed here, from samples alone."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from kvbench.samples import Sample
from kvbench.stats import mean_interval
from kvbench.tasks.summary import summary

GROUP_KEYS = ("task", "length", "depth")  # metadata by which a run's scores are also shown apart


def metrics(samples: Sequence[Sample]) -> dict[str, Any]:
    """Means over the examples of a run, the score with its 95% interval, and scores by task, length and depth.

    Where an example failed, no score is given: a mean over the rest would flatter the policy that broke its budget.
    cache_share: bytes held over bytes of the full cache, both summed over the examples. kept_tokens: mean over
    examples, layers and KV heads. Seconds and bytes are means per example. official: the aggregates that the
    benchmark's own scripts print, where they are not this mean.
    """
    good = [s for s in samples if s.error is None]
    return {
        "n": len(samples),
        "n_failed": len(samples) - len(good),
        **_score(samples),
        "prompt_tokens": _mean([s.prompt_tokens for s in samples]),
        "generated_tokens": _mean([s.generated_tokens for s in good]),
        "kept_tokens": _mean([_mean_kept(s) for s in good]),
        "cache_bytes": _mean([s.cache_bytes for s in good]),
        "peak_bytes": _mean([s.peak_bytes for s in good]),
        "full_cache_bytes": _mean([s.full_cache_bytes for s in good]),
        "cache_share": _share(good),
        "prefill_seconds": _mean([s.prefill_seconds for s in good]),
        "decode_seconds": _mean([s.decode_seconds for s in good]),
        "official": summary(samples),
        "groups": _groups(samples),
    }


def _score(samples: Sequence[Sample]) -> dict[str, Any]:
    scores = [s.score for s in samples if s.score is not None]
    if len(scores) < len(samples) or not scores:
        return {"score": None, "score_low": None, "score_high": None, "interval": None}
    interval = mean_interval(scores)
    return {
        "score": fmean(scores),
        "score_low": interval.low,
        "score_high": interval.high,
        "interval": f"95% {interval.method}",
    }


def by_value(samples: Sequence[Sample], key: str) -> dict[Any, list[Sample]]:
    """The samples of each value that `metadata[key]` takes, in the order of their first appearance."""
    members: dict[Any, list[Sample]] = {}
    for sample in samples:
        value = sample.metadata.get(key)
        if isinstance(value, str | int | float):
            members.setdefault(value, []).append(sample)
    return members


def _groups(samples: Sequence[Sample]) -> dict[str, dict[str, Any]]:
    """`{"length=1024": {n, score, ...}}` for every group key that takes at least two values."""
    groups: dict[str, dict[str, Any]] = {}
    for key in GROUP_KEYS:
        members = by_value(samples, key)
        if len(members) > 1:
            groups |= {f"{key}={value}": {"n": len(group), **_score(group)} for value, group in members.items()}
    return groups


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return fmean(known) if known else None


def _mean_kept(sample: Sample) -> float | None:
    return fmean(n for layer in sample.kept_tokens for n in layer) if sample.kept_tokens else None


def _share(samples: Sequence[Sample]) -> float | None:
    full = sum(s.full_cache_bytes or 0 for s in samples)
    return sum(s.cache_bytes or 0 for s in samples) / full if full else None
