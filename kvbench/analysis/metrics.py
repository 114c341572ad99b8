"""From samples to the numbers of a table: everything in `metrics.json` is computed here, from samples alone."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from statistics import fmean
from typing import Any

from kvbench.analysis.averages import average_intervals
from kvbench.analysis.statistics import mean_interval, weighted_interval
from kvbench.records.sample import Likelihood, Sample
from kvbench.tasks.summary import summary

GROUP_KEYS = ("task", "length", "depth")
"""Metadata by which a run's scores are also shown apart, beside the keys that metadata["groups"] names."""


def metrics(samples: Sequence[Sample]) -> dict[str, Any]:
    """Means over the examples of a run, the score with its 95% interval, and scores by task, length and depth.

    Where an example failed, no score is given: a mean over the rest would flatter the policy that broke its budget.
    cache_bytes: in use; spare_bytes are not among them. cache_share: cache_bytes over keys, values and positions of the
    full cache, both summed over the examples.
    decode_ms_per_token: mean over the examples that decoded a second token. kept_tokens: mean over
    examples, layers and KV heads. evicted_share: requests from whose cache anything was evicted, over all requests
    (mean over examples). Seconds and bytes are means per example. n_shared: examples that shared the model with
    others; where there is any, no seconds and no device_peak_bytes are given: the others are no sample of all.
    likelihood: of runs whose tokens were given, see `_likelihood`; they have no score. official: the aggregates that
    the benchmark's own scripts print, where they are not this mean; official_intervals: 95%, of its means over subsets.
    """
    good = [s for s in samples if s.error is None]
    alone = [] if any(s.shared for s in good) else good
    return {
        "n": len(samples),
        "n_failed": len(samples) - len(good),
        "n_shared": sum(s.shared for s in good),
        **_score(samples),
        "prompt_tokens": _mean([s.prompt_tokens for s in samples]),
        "generated_tokens": _mean([s.generated_tokens for s in good]),
        "kept_tokens": _mean([mean_kept(s) for s in good]),
        "cache_bytes": _mean([s.cache_bytes for s in good]),
        "peak_bytes": _mean([s.peak_bytes for s in good]),
        "device_peak_bytes": _mean([s.device_peak_bytes for s in alone]),
        "spare_bytes": _mean([s.spare_bytes for s in good]),
        "full_cache_bytes": _mean([s.full_cache_bytes for s in good]),
        "full_position_bytes": _mean([s.full_position_bytes for s in good]),
        "cache_share": _share(good),
        "evicted_share": _mean([s.evicted for s in good]),
        "pre_pass_tokens": _mean([s.pre_pass_tokens for s in good]),
        "read_tokens": _mean([mean_read(s) for s in good]),
        "read_bytes": _mean([s.read_bytes for s in good]),
        "prefill_seconds": _mean([s.prefill_seconds for s in alone]),
        "decode_seconds": _mean([s.decode_seconds for s in alone]),
        "decode_ms_per_token": _mean([_ms_per_token(s) for s in alone]),
        "likelihood": _likelihood(samples),
        "official": summary(samples),
        "official_intervals": average_intervals(samples),
        "groups": _groups(samples),
    }


def running(samples: Sequence[Sample], bounded: bool) -> dict[str, Any]:
    """The score, or NLL and perplexity, of the examples so far. bounded: with the interval, which takes a bootstrap."""
    scores = [s.score for s in samples if s.score is not None]
    read = [s.likelihood for s in samples if s.likelihood is not None]
    if any(s.error is not None for s in samples) or not (scores or read):
        return {}
    if not read:
        return {k: v for k, v in _score(samples).items() if k != "interval"} if bounded else {"score": fmean(scores)}
    found = {"nll": token_mean(read), "perplexity": exp(min(token_mean(read), 700.0))}
    if bounded and len(read) > 1:
        interval = weighted_interval([x.nll for x in read], [x.tokens for x in read])
        found |= {"nll_low": interval.low, "nll_high": interval.high}
    return found


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


def _likelihood(samples: Sequence[Sample]) -> dict[str, Any] | None:
    """NLL in nats per token and its exponential, the perplexity, lower is better; None where nothing was read.

    The mean is over all scored tokens, so that a long text weighs more than a short one; its interval is the bootstrap
    over texts, and there is none for a single text. curve: the same mean over the scored tokens among the first
    `lengths` tokens of every text that is so long; texts: how many are. max_kept_tokens [L][H_kv]: over all texts.
    """
    read = [s.likelihood for s in samples if s.likelihood is not None]
    if not read:
        return None
    if len(read) < len(samples):  # as with scores: a mean over the rest would flatter the policy
        return {"nll": None, "perplexity": None}
    nll = token_mean(read)
    interval = None
    if len(read) > 1:
        interval = weighted_interval([x.nll for x in read], [x.tokens for x in read])
    return {
        "mean_over": "tokens",
        "nll": nll,
        "nll_low": interval and interval.low,
        "nll_high": interval and interval.high,
        "interval": interval and f"95% {interval.method} over texts",
        "perplexity": exp(nll),
        "scored_tokens": sum(x.tokens for x in read),
        "block": read[0].block,
        "max_kept_tokens": _most(read),
        "curve": _curve(read),
    }


def token_mean(read: Sequence[Likelihood]) -> float:
    """Mean NLL over the scored tokens of all texts."""
    return sum(x.nll * x.tokens for x in read) / sum(x.tokens for x in read)


def _most(read: Sequence[Likelihood]) -> list[list[int]]:
    """[L][H_kv] the most tokens held while any of the texts was scored."""
    layers = zip(*(x.max_kept_tokens for x in read), strict=True)
    return [[max(heads) for heads in zip(*layer, strict=True)] for layer in layers]


def _curve(read: Sequence[Likelihood]) -> dict[str, list[Any]]:
    ends = {x.lengths[-1] for x in read}
    lengths = sorted({n for x in read for n in x.lengths if n == max(ends) or n not in ends or n & (n - 1) == 0})
    # Where one text ends the others have no sum, unless that is where all end that come so far.
    reached = [[x.sum_at(length) for x in read if length in x.lengths] for length in lengths]
    return {
        "lengths": lengths,
        "nll": [sum(nll for nll, _ in sums) / sum(tokens for _, tokens in sums) for sums in reached],
        "texts": [len(sums) for sums in reached],
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
    for key in dict.fromkeys((*GROUP_KEYS, *(key for s in samples for key in s.metadata.get("groups", ())))):
        members = by_value(samples, key)
        if len(members) > 1:
            groups |= {f"{key}={value}": {"n": len(group), **_score(group)} for value, group in members.items()}
    return groups


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return fmean(known) if known else None


def mean_kept(sample: Sample) -> float | None:
    """Tokens held at the end, mean over layers and KV heads."""
    return fmean(n for layer in sample.kept_tokens for n in layer) if sample.kept_tokens else None


def mean_read(sample: Sample) -> float | None:
    """Tokens that the last decoded token read, mean over layers and KV heads, where the policy has a reader."""
    return fmean(n for layer in sample.read_tokens for n in layer) if sample.read_tokens else None


def _share(samples: Sequence[Sample]) -> float | None:
    full = sum((s.full_cache_bytes or 0) + (s.full_position_bytes or 0) for s in samples)
    return sum(s.cache_bytes or 0 for s in samples) / full if full else None


def _ms_per_token(sample: Sample) -> float | None:
    """Milliseconds for each decoded token after the first, an EOS included; None where there is none."""
    if sample.decode_seconds is None or not sample.decode_steps:
        return None
    return 1000 * sample.decode_seconds / sample.decode_steps
