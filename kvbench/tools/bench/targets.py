"""What kvbench promises on a GPU, each promise with its figure, its bound, and whether it was met.

Ratios are taken between providers that take turns, a few tokens at a time, where two caches fit side by side.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from kvbench.report.figures.curves import Chart, ChartGroup, ChartRow, Dot, Picture
from kvbench.terminal.errors import UsageError
from kvbench.tools.bench import rivals
from kvbench.tools.bench.about import ABOUT
from kvbench.tools.bench.bench import Bench, Row
from kvbench.tools.bench.clock import Clock, Spread, paired_ratio, spread
from kvbench.tools.bench.generating import LEAST_BUDGET, LEAST_LENGTH
from kvbench.tools.bench.generation import Job, Run, measure, prefills_in_turns, steps_in_turns
from kvbench.tools.bench.journal import Cell, Record, attempt, why_not
from kvbench.tools.bench.machine import release
from kvbench.tools.bench.providers import Provider, ours, random_ids, shape_of
from kvbench.tools.bench.settings import scaled

TOKENS, ROUNDS = 4, 8  # decoded in a turn, and timed turns after one that warms up
PREFILLS = 2  # timed turns of whole prompts
BUDGET, SHORT, MIDDLE, LONG = 1024, 8192, 32768, 130048
BLOCK = 1024  # prompt tokens between two evictions of the 128k prefill
WINDOWED = ("snapkv", "pyramidkv", "ada_snapkv", "tova", "cake", "kvec", "caote_snapkv")
EVICTING = ("h2o", "tova", "roco", "cake", "d2o", "caote_snapkv")
MOST_BETTER = 10.0  # times that a figure is drawn as better than its bound: a share of nothing would be any number
COMMON = (32, 64, 96)  # batches at which the 2-bit store and the full cache are compared


@dataclass(frozen=True)
class Target:
    """One promise about one method: the unit of its figure, the bound, on which side of it the figure is to lie."""

    name: str
    method: str
    unit: str
    bound: float
    at_least: bool
    run: Callable[[Bench], Record]

    @property
    def key(self) -> str:
        return f"{self.name}, {self.method}"

    def met(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound

    def times_better(self, value: float) -> float:
        """How often a figure reaches the bound: from 1 on it is met. MOST_BETTER at most, as where it is 0."""
        if self.at_least:
            return min(value / self.bound, MOST_BETTER)
        return MOST_BETTER if value * MOST_BETTER <= self.bound else self.bound / value

    @property
    def words(self) -> str:
        return f"{'at least' if self.at_least else 'at most'} {self.bound:g}"


@dataclass(frozen=True)
class TargetsProtocol:
    """Cells are targets."""

    name: str = "targets"
    about: str = ABOUT["targets"]
    series: str = "targets"
    model: str = "llama31_8b_instruct"

    def remarks(self, bench: Bench) -> list[str]:
        long, middle, short = (_length(bench, n) for n in (LONG, MIDDLE, SHORT))
        return [
            f"prompts of {long}, {middle} and {short} tokens, budget {_budget(bench)}; ratios over {ROUNDS} rounds of "
            f"{TOKENS} tokens in turns; values are medians of the rounds",
            *([] if bench.judged else ["bounds are for a GPU at scale=1: nothing is judged here"]),
        ]

    def identity(self, bench: Bench) -> dict[str, Any]:
        return {}

    def cells(self, bench: Bench) -> list[Cell]:
        return [Cell(target.key, partial(target.run, bench)) for target in self._chosen(bench)]

    def _chosen(self, bench: Bench) -> list[Target]:
        slugs, every = bench.settings.policies, list(targets())
        methods = list(dict.fromkeys(target.method for target in every))
        for slug in slugs or ():
            if slug not in methods:
                raise UsageError(f"policies={slug} is in no target (allowed: {', '.join(methods)})")
        return [target for target in every if slugs is None or target.method in slugs]

    def rows(self, bench: Bench, found: Mapping[str, Record]) -> list[Row]:
        return [_row(bench, target, found[target.key]) for target in self._chosen(bench) if target.key in found]

    def picture(self, bench: Bench, rows: list[Row]) -> Picture:
        """Every target beside its bar, by how many times it is better: right of the line is what was promised."""
        by_key = {target.key: target for target in self._chosen(bench)}
        groups: dict[str, list[ChartRow]] = {}
        for row in rows:
            target = by_key[f"{row.task}, {row.method}"]
            groups.setdefault(f"{row.task}: {row.metric}, {row.bound}", []).append(_chart_row(target, row))
        if not rows:
            return []
        notes = [
            "Dashed: the bar. Right of it a figure is better than its bar by so many times, left of it worse "
            f"({MOST_BETTER:g} times better or more stand at {MOST_BETTER:g}).",
            "Lines beside the dots: 20th to 80th percentile of the rounds.",
            *(f"{row.task}, {row.method}: {row.note}." for row in rows if row.value is None),
        ]
        return Chart("times better than the bar", [ChartGroup(*group) for group in groups.items()], notes)


def _chart_row(target: Target, row: Row) -> ChartRow:
    """A target's figure over its bar, or the other way round where it must stay below; what came of it in words."""
    if row.value is None:
        return ChartRow(row.method, [], "not measurable here")
    verdict = {True: "met", False: "missed", None: "not judged here"}[row.met]
    if row.p20 is None or row.p80 is None:
        return ChartRow(row.method, [Dot(row.method, target.times_better(row.value))], f"{row.value:#.3g}: {verdict}")
    low, high = sorted(target.times_better(side) for side in (row.p20, row.p80))
    words = f"{row.value:#.3g} ({row.p20:#.3g} to {row.p80:#.3g}): {verdict}"
    return ChartRow(row.method, [Dot(row.method, target.times_better(row.value), low, high)], words)


def _row(bench: Bench, target: Target, record: Record) -> Row:
    value, sides = record.get("value"), record.get("spread") or {}
    note = record["note"] if "note" in record else why_not(record)
    fields = ("kvbench", "targets", bench.model_name, target.method, None, "", target.name, target.unit, value, note)
    met = target.met(value) if value is not None and bench.judged else None
    return Row(*fields, **sides, bound=target.words, met=met)


def targets() -> Iterator[Target]:
    """Every promise, the cheap ones first."""
    for slug in EVICTING:
        yield Target("evicting_step", slug, "x a growing step", 1.05, False, partial(evicting_step, slug))
    yield Target("step_at_equal_bytes", "ada_snapkv", "x snapkv's step", 1.1, False, ada_step)
    for slug in WINDOWED:
        share = partial(eviction_share, slug)
        yield Target("eviction_in_32k_prefill", slug, "share of the full cache's", 0.02, False, share)
    yield Target("column_sums_in_32k_prefill", "h2o", "x the attention forward", 1.0, False, column_sums)
    yield Target("peak_of_128k_prefill", "snapkv", "GB beside the weights", 2.0, False, peak_of_blocks)
    yield Target("tokens_per_s_of_2_bit_store", "ott_g128_r32", "x the full cache", 2.3, True, store_throughput)
    yield Target("decode_after_128k", "cake", "x the full cache's speed", 10.0, True, long_decode)


# --- how they are measured -------------------------------------------------------------------------------------------
def _length(bench: Bench, length: int) -> int:
    return scaled(length, bench.scale, LEAST_LENGTH)


def _budget(bench: Bench) -> int:
    return scaled(BUDGET, bench.scale, LEAST_BUDGET)


def prefilled(bench: Bench, provider: Provider, length: int) -> Run:
    """A provider that has taken a prompt in, after a short one that warmed it up."""
    model = bench.built.model
    warm = Run(model, provider, random_ids(model, 1, min(length, _length(bench, SHORT))))
    warm.prefill()
    warm.decode(2)
    run = Run(model, provider, random_ids(model, 1, length))
    run.prefill()
    return run


def _turns(runs: Sequence[Run]) -> list[list[float]]:
    return steps_in_turns(runs, ROUNDS, TOKENS)


def _ratio(ratio: Spread, note: str) -> Record:
    return {"value": ratio.p50, "spread": ratio.as_dict(), "note": note}


def evicting_step(slug: str, bench: Bench) -> Record:
    """A step that evicts beside one of snapkv, which grows, at the same budget."""
    budget, length = _budget(bench), _length(bench, SHORT)
    providers = ours(slug, budget, schedule="prompt", decode="evict"), ours("snapkv", budget)
    mine, grows = _turns([prefilled(bench, provider, length) for provider in providers])
    times = f"{spread(mine).p50:.2f} ms against {spread(grows).p50:.2f} ms of snapkv"
    return _ratio(paired_ratio(mine, grows), f"{times}, budget {budget} after {length} tokens")


def ada_step(bench: Bench) -> Record:
    """ada_snapkv's step beside snapkv's: budgets per head, the same number of tokens in all."""
    budget, length = _budget(bench), _length(bench, SHORT)
    runs = [prefilled(bench, ours(slug, budget), length) for slug in ("ada_snapkv", "snapkv")]
    mine, plain = _turns(runs)
    held = " and ".join(f"{run.held_bytes / 2**20:.1f}" for run in runs)
    return _ratio(paired_ratio(mine, plain), f"{spread(mine).p50:.2f} ms, {held} MiB held")


def long_decode(bench: Bench) -> Record:
    """The full cache's step after 128k tokens over CAKE's at its budget, beside snapkv and transformers' own cache."""
    budget, length = _budget(bench), _length(bench, LONG)
    sdpa = rivals.provider("transformers_sdpa", None, length)
    providers = (ours("cake", budget), ours("snapkv", budget), ours("full", None), sdpa)
    runs = [prefilled(bench, provider, length) for provider in providers]
    times = _turns(runs)
    mine, _, full, _ = times
    ms = [spread(t).p50 for t in times]
    read = [bench.built.bytes_read + run.read_bytes for run in runs]
    share = bench.share_of_limit(ms[0], runs[0].read_bytes)
    note = (
        f"cake {ms[0]:.2f} ms ({share:.0%} of the limit), snapkv {ms[1]:.2f}, full {ms[2]:.2f}, "
        f"transformers' sdpa {ms[3]:.2f}; the bytes to read allow {read[2] / read[0]:.1f}x"
    )
    return _ratio(paired_ratio(full, mine), note)


def eviction_share(slug: str, bench: Bench) -> Record:
    """What a policy's prefill of 32k tokens takes beyond the full cache's, over the latter: its eviction."""
    length = _length(bench, MIDDLE)
    mine, full = _prefills(bench, slug, length)
    share = spread([a / b - 1 for a, b in zip(mine, full, strict=True)])
    return _ratio(share, f"{spread(mine).p50:.0f} ms against {spread(full).p50:.0f} ms of the full cache")


def column_sums(bench: Bench) -> Record:
    """What h2o's prefill takes beyond the full cache's, sums over all rows and eviction, over the attention alone."""
    length = _length(bench, MIDDLE)
    mine, full = _prefills(bench, "h2o", length)
    attention = attention_ms(bench, length)
    ratio = spread([(a - b) / attention for a, b in zip(mine, full, strict=True)])
    times = f"{spread(mine).p50:.0f} ms against {spread(full).p50:.0f} ms of the full cache"
    return _ratio(ratio, f"{times}; attention of all layers alone {attention:.0f} ms")


def _prefills(bench: Bench, slug: str, length: int) -> list[list[float]]:
    """Milliseconds of prefills under a policy and under the full cache, in turns."""
    model = bench.built.model
    providers = ours(slug, _budget(bench), schedule="prompt"), ours("full", None)
    return prefills_in_turns([Run(model, p, random_ids(model, 1, length)) for p in providers], PREFILLS)


def attention_ms(bench: Bench, length: int, repeats: int = 3) -> float:
    """Milliseconds of the causal attention of all layers over a prompt, by PyTorch's own kernel: the median."""
    shape, clock = shape_of(bench.built.model), Clock(bench.device)
    heads = shape.query_heads, shape.kv_heads, shape.kv_heads
    queries, keys, values = (
        torch.randn(1, length, n, shape.head_dim, dtype=shape.dtype, device=bench.device).transpose(1, 2) for n in heads
    )
    for _ in range(repeats + 2):  # the first mark follows a call that warms up
        F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        clock.mark()
    return shape.layers * statistics.median(clock.laps())


def peak_of_blocks(bench: Bench) -> Record:
    """The peak of memory while 128k tokens are taken in block by block, beside the weights."""
    model, length = bench.built.model, _length(bench, LONG)
    provider = ours("snapkv", _budget(bench), schedule="blocks", block=scaled(BLOCK, bench.scale, LEAST_LENGTH))
    found = measure(model, provider, Job(length, 1, 1))
    peak, held = found["peak_prefill_bytes"], found["held_bytes"]
    assert isinstance(held, int)
    if not isinstance(peak, int):
        return {"value": None, "note": f"this device does not count its memory; {held / 1e9:.3f} GB held"}
    beside = (peak - bench.built.weights_bytes) / 1e9
    return {"value": beside, "note": f"peak {peak / 1e9:.2f} GB, weights {bench.built.weights_bytes / 1e9:.2f} GB"}


def store_throughput(bench: Bench) -> Record:
    """Decoded tokens per second of a 2-bit store over the full cache's, at the largest batch that both fit in.

    One after the other: two caches of that size do not fit side by side.
    """
    length = scaled(4096, bench.scale, LEAST_LENGTH)
    value, notes = None, []
    for batch in dict.fromkeys(max(1, b // bench.scale) for b in COMMON):
        pair = [_step_of(bench, ours(slug, None), length, batch) for slug in ("full", "ott_g128_r32")]
        if None in pair:
            notes.append(f"{('full', 'ott')[pair.index(None)]} does not fit at batch {batch}")
            break
        full, ott = (ms or 0.0 for ms in pair)
        value = full / ott
        notes = [f"batch {batch}, {length} tokens: {full:.1f} and {ott:.1f} ms a step"]
    return {"value": value, "note": "; ".join(notes)}


def _step_of(bench: Bench, provider: Provider, length: int, batch: int) -> float | None:
    """Milliseconds of a step for all sequences, None where they do not fit."""
    run = partial(_steps, bench, provider, length, batch)
    found = attempt(Cell(provider.name, run))
    release(bench.device)
    return None if "out_of_memory" in found else float(found["ms"])


def _steps(bench: Bench, provider: Provider, length: int, batch: int) -> Record:
    run = Run(bench.built.model, provider, random_ids(bench.built.model, batch, length))
    run.prefill(in_parts=True)
    run.decode(2)
    return {"ms": statistics.mean(run.decode(TOKENS * ROUNDS))}
