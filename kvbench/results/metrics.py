"""Computes the numbers of tables and of `metrics.json` from samples: means over prompts, intervals, groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from math import exp
from operator import attrgetter
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal, TypeAlias

from kvbench.results import divergence, evidence, statistics
from kvbench.results.divergence import DivergenceNumbers
from kvbench.results.evidence import EvidenceNumbers
from kvbench.results.files import write_json
from kvbench.results.numbers import number
from kvbench.results.samples import Likelihood, Sample
from kvbench.results.statistics import FEWEST, mean_interval, stratified_interval, weighted_interval
from kvbench.tasks.scores import by_subset, scores_of, subsets_by, summary, summary_module

FILE_NAME = "metrics.json"
Measured: TypeAlias = float | Any
"""A number that is None if it was not measured or an example failed; type checkers allow its use as a number."""
CODE = b"".join(
    Path(file).read_bytes() for file in (__file__, *(str(m.__file__) for m in (statistics, divergence, evidence)))
)
"""The code that computes the numbers."""
GROUP_KEYS = ("task", "length", "depth")
"""Metadata keys by which scores are also grouped, in addition to the keys in metadata["groups"]."""


def of_prompts(samples: Sequence[Sample]) -> list[Sample]:
    """One sample for each prompt: its first answer, with the mean score of all; None if an answer has no score."""
    answers = prompts_of(samples)
    return [replace(group[0], score=_mean_score(group)) if len(group) > 1 else group[0] for group in answers]


def prompts_of(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The answers to each prompt."""
    answers: dict[int, list[Sample]] = {}
    for sample in samples:
        answers.setdefault(sample.index - (sample.sample or 0), []).append(sample)
    return list(answers.values())


def _mean_score(answers: Sequence[Sample]) -> float | None:
    scores = [answer.score for answer in answers if answer.score is not None]
    return fmean(scores) if len(scores) == len(answers) else None


def average_intervals(samples: Sequence[Sample]) -> dict[str, tuple[float, float]]:
    """95% intervals, in percent, of the averages over subsets in `official`, by the same names.

    An average has one if it is over several subsets with two scores or more each, and if no example failed.
    """
    module, groups = summary_module(samples), strata(samples)
    averages: dict[str, list[str]] = module.averages(groups) if module and groups else {}
    found = {}
    for name, members in averages.items():
        scores = [groups[member] for member in members]
        if len(scores) > 1 and min(map(len, scores)) > 1:
            interval = stratified_interval(scores)
            found[name] = 100 * interval.low, 100 * interval.high
    return found


def strata(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """Scores (0 to 1) by subset; {} if a score is missing or the benchmark does not average over subsets."""
    key = subsets_by(samples)
    if key is None or any(sample.score is None for sample in samples):
        return {}
    return {name: scores_of(group) for name, group in by_subset(of_prompts(samples), key).items()}


def _mean_of(value: Callable[[Sample], float | None]) -> Callable[[Sequence[Sample]], float | None]:
    return lambda samples: _mean([value(sample) for sample in samples])


def _end_of(
    value: Callable[[Sample], float | None], end: Literal["low", "high"]
) -> Callable[[Sequence[Sample]], float | None]:
    """An end of the interval of the mean over prompts; None if a value is unknown."""

    def compute(samples: Sequence[Sample]) -> float | None:
        known = [v for sample in samples if (v := value(sample)) is not None]
        return float(getattr(mean_interval(known), end)) if known and len(known) == len(samples) else None

    return compute


def _per_head(tokens: Sequence[Sequence[int]] | None) -> float | None:
    """Mean over layers and KV heads."""
    return fmean(n for layer in tokens for n in layer) if tokens else None


def mean_kept(sample: Sample) -> float | None:
    """Tokens held at the end, mean over layers and KV heads."""
    return _per_head(sample.kept_tokens)


def mean_unmasked(sample: Sample) -> float | None:
    """Tokens held at the end whose keys are not masked, mean over layers and KV heads, if any are masked."""
    kept, masked = _per_head(sample.kept_tokens), _per_head(sample.masked_tokens)
    return None if kept is None or masked is None else kept - masked


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return fmean(known) if known else None


def _share(samples: Sequence[Sample]) -> float | None:
    full = sum((s.full_cache_bytes or 0) + (s.full_position_bytes or 0) + (s.state_bytes or 0) for s in samples)
    return sum(s.cache_bytes or 0 for s in samples) / full if full else None


def _ms_per_token(sample: Sample) -> float | None:
    """Milliseconds per decoded token after the first, including an EOS; None if there is no such token."""
    if sample.decode_seconds is None or not sample.decode_steps:
        return None
    return 1000 * sample.decode_seconds / sample.decode_steps


def cut_off(sample: Sample) -> float | None:
    """1.0 if an answer ended at its token limit, else 0.0; None if its length or limit is unknown."""
    if sample.finish_reason is not None:
        return float(sample.finish_reason == "length")
    if sample.generated_tokens is None or not sample.max_new_tokens:
        return None
    return float(sample.generated_tokens >= sample.max_new_tokens)


def looping(sample: Sample) -> float | None:
    """1.0 if an answer repeats itself until its end, else 0.0; None if it is unknown."""
    return None if sample.repetition is None else float(sample.repetition.looping)


def _looping_cut(sample: Sample) -> float | None:
    """1.0 if an answer repeats itself until its token limit, else 0.0; None if it is unknown."""
    cut, loops = cut_off(sample), looping(sample)
    return None if cut is None or loops is None else cut * loops


def _loop_start(samples: Sequence[Sample]) -> float | None:
    starts = [x.repetition.start for x in samples if x.repetition is not None and x.repetition.start is not None]
    return float(median(starts)) if starts else None


def _clipped(samples: Sequence[Sample]) -> int | None:
    """Sum over all answers; None if no scale is fixed."""
    counts = [sample.clipped for sample in samples if sample.clipped is not None]
    return sum(counts) if counts else None


def _pass_at_k(samples: Sequence[Sample]) -> float | None:
    """Share of prompts with a right answer among their k answers; None unless answers are right or wrong."""
    if not any(s.sample for s in samples) or any(s.score not in (0, 1) for s in samples):
        return None
    right = {s.index - (s.sample or 0) for s in samples if s.score == 1}
    return len(right) / len(of_prompts(samples))


@dataclass(frozen=True, kw_only=True, eq=False)
class Numbers(EvidenceNumbers, DivergenceNumbers):
    """The measurements of a run besides its score. Each field is a key of metrics.json and a column of tables."""

    prompt_tokens: float | None = number("mean per example", over="all")
    generated_tokens: float | None = number("mean per example")
    cut_share: float | None = number("share of answers that reached max_new_tokens", _mean_of(cut_off))
    cut_share_low: float | None = number("lower end of its 95% interval", _end_of(cut_off, "low"))
    cut_share_high: float | None = number("upper end of its 95% interval", _end_of(cut_off, "high"))
    looping_share: float | None = number("share of answers that repeat themselves until their end", _mean_of(looping))
    looping_share_low: float | None = number("lower end of its 95% interval", _end_of(looping, "low"))
    looping_share_high: float | None = number("upper end of its 95% interval", _end_of(looping, "high"))
    looping_cut_share: float | None = number(
        "share of answers that repeat themselves until max_new_tokens", _mean_of(_looping_cut)
    )
    loop_start: float | None = number("tokens before the loop, median over the answers with one", _loop_start)
    rep_4: float | None = number(
        "share of 4-grams of an answer that occurred before in it, mean over examples",
        _mean_of(lambda sample: None if sample.repetition is None else sample.repetition.rep_4),
    )
    in_thought: float | None = number(
        "number of answers that were cut off inside a thought, and are scored as empty answers",
        lambda samples: sum(sample.in_thought or False for sample in samples) or None,
    )
    clipped: float | None = number(
        "numbers of keys and values beyond the fixed scales of a store, which are stored as the largest one; sum",
        _clipped,
        over="all",
    )
    pass_at_k: float | None = number(
        "share of prompts with a right answer among several sampled ones", _pass_at_k, over="all"
    )
    kept_tokens: Measured = number("tokens held at the end; mean over examples, layers, KV heads", _mean_of(mean_kept))
    cache_bytes: Measured = number(
        "bytes held at the end: keys, values, positions, statistics, states, without spare bytes; mean per example"
    )
    spare_bytes: float | None = number("reserved but unused at the end, not part of cache_bytes; mean per example")
    state_bytes: float | None = number("states of recurrent layers, part of cache_bytes; mean per example")
    peak_bytes: float | None = number("maximum of held plus spare bytes, mean per example")
    device_peak_bytes: float | None = number(
        "most memory allocated on the CUDA devices, including weights; mean per example", over="alone"
    )
    full_cache_bytes: Measured = number("keys and values of all tokens of prompt and answer, mean per example")
    full_position_bytes: float | None = number("their positions, 0 for caches that store none; mean per example")
    cache_share: Measured = number("cache_bytes / (full_cache_bytes + full_position_bytes + state_bytes)", _share)
    kv_footprint: float | None = number(
        "entries held, summed over all fed tokens and pre-passes, as a share of the full cache's; mean per example"
    )
    kv_footprint_low: float | None = number("lower end of its 95% interval", _end_of(attrgetter("kv_footprint"), "low"))
    kv_footprint_high: float | None = number(
        "upper end of its 95% interval", _end_of(attrgetter("kv_footprint"), "high")
    )
    evicted_share: float | None = number(
        "share of requests with at least one evicted token", _mean_of(lambda sample: sample.evicted)
    )
    read_tokens: float | None = number(
        "sparse attention: tokens that the last decoded token attended to; mean over examples, layers, KV heads",
        _mean_of(lambda sample: _per_head(sample.read_tokens)),
    )
    read_bytes: float | None = number("sparse attention: keys, values, positions, summaries it read; mean per example")
    unmasked_tokens: float | None = number(
        "policies that mask keys: tokens that would be held if masked tokens were freed; they are not",
        _mean_of(mean_unmasked),
    )
    pre_pass_tokens: float | None = number("tokens of extra forward passes (pre-passes); mean per example")
    pre_pass_steps: float | None = number("extra forward passes, one after the other; mean per example")
    recomputed_tokens: float | None = number(
        "prompt tokens of a shared context that were computed again for a later question; mean per example"
    )
    prefill_seconds: float | None = number("mean per example", over="alone")
    decode_seconds: float | None = number("mean per example", over="alone")
    decode_ms_per_token: float | None = number(
        "milliseconds per step after the prefill, mean per example", _mean_of(_ms_per_token), over="alone"
    )


def metrics(samples: Sequence[Sample]) -> dict[str, Any]:
    """The fields of `Numbers`, the score with its 95% interval, and scores by task, length and depth.

    Several answers to a prompt count as their mean: n, the score and its interval count prompts, n_failed and n_shared
    count answers. If an example failed, there is no score: a mean over the others would favour a policy that exceeded
    its budget. n_shared: the number of examples batched with others; if it is not 0, times and device_peak_bytes are
    missing. likelihood: for runs on given texts, which have no score (see `_likelihood`). official: the aggregates of
    the benchmark's own scripts; official_intervals: 95% intervals of their means over subsets. watched: numbers of
    watchers.
    """
    good = [s for s in samples if s.error is None]
    shared = sum(s.shared for s in good)
    chosen = {"all": samples, "good": good, "alone": [] if shared else good}
    values = {}
    for one in fields(Numbers):
        compute = one.metadata["of"] or _mean_of(attrgetter(one.name))
        values[one.name] = compute(chosen[one.metadata["over"]])
    return {
        "n": len(of_prompts(samples)),
        "n_failed": len(samples) - len(good),
        "n_shared": shared,
        **_score(samples),
        **values,
        "likelihood": _likelihood(samples),
        # without the thoughts before the answers
        "official": summary([s if s.answer is None else replace(s, output=s.answer) for s in samples]),
        "official_intervals": average_intervals(samples),
        "groups": _groups(samples),
        "watched": _watched(good),
    }


def _watched(samples: Sequence[Sample]) -> dict[str, float | None]:
    """The numbers of watchers, mean over the examples that have one."""
    names = dict.fromkeys(name for sample in samples for name in sample.watched or ())
    return {name: _mean([(sample.watched or {}).get(name) for sample in samples]) for name in names}


def running(samples: Sequence[Sample], bounded: bool) -> dict[str, Any]:
    """The score, or NLL and perplexity, of the examples so far. bounded: add the interval (a bootstrap)."""
    scores = [s.score for s in samples if s.score is not None]
    read = [s.likelihood for s in samples if s.likelihood is not None]
    if any(s.error is not None for s in samples):
        return {}
    if (kl := divergence.over_examples(attrgetter("mean_kl"))(samples)) is not None:
        return {"kl": kl}
    if not (scores or read):
        return {}
    if not read:
        return {k: v for k, v in _score(samples).items() if k != "interval"} if bounded else {"score": fmean(scores)}
    found = {"nll": token_mean(read), "perplexity": exp(min(token_mean(read), 700.0))}
    if bounded and (interval := _nll_interval(read)):
        found |= {"nll_low": interval.low, "nll_high": interval.high}
    return found


def _nll_interval(read: Sequence[Likelihood]) -> statistics.Interval | None:
    """The interval of the mean NLL over texts; None for fewer than 5."""
    return weighted_interval([x.nll for x in read], [x.tokens for x in read]) if len(read) >= FEWEST else None


def _score(samples: Sequence[Sample]) -> dict[str, Any]:
    prompts = of_prompts(samples)
    scores = [s.score for s in prompts if s.score is not None]
    if len(scores) < len(prompts) or not scores:
        return {"score": None, "score_low": None, "score_high": None, "interval": None}
    interval = mean_interval(scores)
    return {
        "score": fmean(scores),
        "score_low": interval.low,
        "score_high": interval.high,
        "interval": f"95% {interval.method}",
    }


def _likelihood(samples: Sequence[Sample]) -> dict[str, Any] | None:
    """NLL in nats per token and its exponential, the perplexity; None if no text was scored.

    The mean is over all scored tokens, so that long texts weigh more. Its interval is the bootstrap over texts, from 5
    texts on. curve: for each of `lengths`, the mean over the scored tokens among the first that many tokens of every
    text that is long enough, and the number of these `texts`. max_kept_tokens [L][H_kv]: the maximum over texts.
    """
    read = [s.likelihood for s in samples if s.likelihood is not None]
    if not read:
        return None
    if len(read) < len(samples):  # as with scores: no mean over the other texts
        return {"nll": None, "perplexity": None}
    nll, interval = token_mean(read), _nll_interval(read)
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


def token_mean(read: Sequence[Any]) -> float:
    """Mean NLL over the scored tokens of all texts."""
    return float(sum(x.nll * x.tokens for x in read) / sum(x.tokens for x in read))


def _most(read: Sequence[Likelihood]) -> list[list[int]]:
    """[L][H_kv] the most tokens held while any text was scored."""
    layers = zip(*(x.max_kept_tokens for x in read), strict=True)
    return [[max(heads) for heads in zip(*layer, strict=True)] for layer in layers]


def _curve(read: Sequence[Likelihood]) -> dict[str, list[Any]]:
    ends = {x.lengths[-1] for x in read}
    lengths = sorted({n for x in read for n in x.lengths if n == max(ends) or n not in ends or n & (n - 1) == 0})
    # At the end of one text the others have no sum, unless all texts that are long enough end there.
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
            groups |= {
                f"{key}={value}": {"n": len(of_prompts(group)), **_score(group)} for value, group in members.items()
            }
    return groups


def write_metrics(folder: Path, samples: Sequence[Sample]) -> dict[str, Any]:
    """Compute and write the numbers of a finished run. Raises OSError."""
    found = metrics(samples)
    write_json(folder / FILE_NAME, found)
    return found


@cache
def keys() -> frozenset[str]:
    """The keys of metrics.json."""
    return frozenset(metrics(()))
