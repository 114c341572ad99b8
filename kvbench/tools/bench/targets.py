"""What kvbench promises on a GPU, each promise with its figure, its bound, and whether it was met.

Ratios are taken between providers that take turns, a few tokens at a time. Bounds are shares of what the bytes allow
at a copy's bandwidth; where a promise is a ratio, its note says which ratio the bytes allow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.cache.cache import KVCache
from kvbench.cache.evict import Evictions
from kvbench.kernels.decode import decode_attention
from kvbench.report.figures.curves import Chart, ChartGroup, ChartRow, Picture
from kvbench.terminal.errors import UsageError
from kvbench.tools.bench.bench import Bench, BenchProtocol, Row
from kvbench.tools.bench.clock import Clock, Spread, paired_ratio, sets_of_inputs, spread, time_calls
from kvbench.tools.bench.generating import LEAST_BUDGET, LEAST_LENGTH
from kvbench.tools.bench.generation import PROFILED, Job, Run, measure, steps_in_turns, warm_up
from kvbench.tools.bench.journal import Cell, Record, why_not
from kvbench.tools.bench.providers import Provider, ours, random_ids, recordable, shape_of
from kvbench.tools.bench.report import dots_of
from kvbench.tools.bench.settings import scaled
from kvbench.tools.bench.sweep import NEW, lone_side, one_round, seconds_of, variants_of

TOKENS, ROUNDS = 4, 8  # decoded in a turn, and timed turns after one that warms up
PREFILLS = 3  # timed prefills of an eviction's share
BUDGET, SHORT, MIDDLE, LONG = 1024, 8192, 32768, 130048
BLOCK = 1024  # prompt tokens between two evictions of the 128k prefill
TOGETHER = 32  # sequences of a batch
WINDOWED = ("snapkv", "pyramidkv", "ada_snapkv", "tova", "cake", "kvec", "caote_snapkv")
EVICTING = ("h2o", "tova", "roco", "cake", "d2o", "caote_snapkv")
MOST_BETTER = 10.0  # times that a figure is drawn as better than its bound: a share of nothing would be any number


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
        return f"{'at least' if self.at_least else 'at most'} {self.bound:.3g}"


def targets() -> Iterator[Target]:
    """Every promise, the cheap ones first."""
    yield Target("attention_of_32", "decode_attention", "x full attention", 5.0, True, attention_of_many)
    for slug in EVICTING:
        evicting = partial(beside_snapkv, slug, schedule="prompt", decode="evict")
        yield Target("evicting_step", slug, "x a growing step", 1.1, False, evicting)
    ada = partial(beside_snapkv, "ada_snapkv")
    yield Target("step_at_equal_bytes", "ada_snapkv", "x snapkv's step", 1.1, False, ada)
    for slug in WINDOWED:
        share = partial(eviction_share, slug)
        yield Target("eviction_in_32k_prefill", slug, "share of the rest of it", 0.02, False, share)
    yield Target("column_sums_in_32k_prefill", "h2o", "x the attention forward", 1.0, False, column_sums)
    yield Target("peak_of_128k_prefill", "snapkv", "GB beside the weights", 2.0, False, peak_of_blocks)
    stored = partial(share_of_bound, "ott_g128_r32", None, 4096, TOGETHER)
    yield Target("step_of_2_bit_store", "ott_g128_r32", "of its bytes' bound", 0.6, True, stored)
    long = partial(share_of_bound, "cake", BUDGET, LONG, 1)
    yield Target("decode_after_128k", "cake", "of its bytes' bound", 0.8, True, long)
    yield Target("sweep_of_36_at_8k", "rows", "x lone runs", 1 / 15, False, sweep_round)


@dataclass(frozen=True)
class TargetsProtocol(BenchProtocol):
    """Cells are targets."""

    name: str = "targets"
    model: str = "llama31_8b_instruct"

    def remarks(self, bench: Bench) -> list[str]:
        long, middle, short = (_length(bench, n) for n in (LONG, MIDDLE, SHORT))
        return [
            f"prompts of {long}, {middle} and {short} tokens, budget {_budget(bench)}; ratios over {ROUNDS} rounds of "
            f"{TOKENS} tokens in turns; values are medians of the rounds",
            *([] if bench.judged else ["bounds are for a GPU at scale=1: nothing is judged here"]),
        ]

    def cells(self, bench: Bench) -> list[Cell]:
        return [Cell(t.key, partial(t.run, bench)) for t in self._chosen(bench)]

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
    sides = "" if row.p20 is None else f" ({row.p20:#.3g} to {row.p80:#.3g})"
    dots = dots_of([row], lambda _, value: target.times_better(value))
    return ChartRow(row.method, dots, f"{row.value:#.3g}{sides}: {verdict}")


def _row(bench: Bench, target: Target, record: Record) -> Row:
    value, sides = record.get("value"), record.get("spread") or {}
    note = record["note"] if "note" in record else why_not(record)
    fields = ("kvbench", "targets", bench.model_name, target.method, None, "", target.name, target.unit, value, note)
    met = target.met(value) if value is not None and bench.judged else None
    return Row(*fields, **sides, bound=target.words, met=met)


# --- how they are measured -------------------------------------------------------------------------------------------
def _length(bench: Bench, length: int) -> int:
    return scaled(length, bench.scale, LEAST_LENGTH)


def _budget(bench: Bench) -> int:
    return scaled(BUDGET, bench.scale, LEAST_BUDGET)


def _ratio(ratio: Spread, note: str) -> Record:
    return {"value": ratio.p50, "spread": ratio.as_dict(), "note": note}


def prefilled(bench: Bench, provider: Provider, length: int, batch: int = 1) -> Run:
    """A provider that has taken a prompt in, after a short one that warmed it up."""
    model = bench.built.model
    warm_up(model, provider, min(length, _length(bench, SHORT)), batch)
    run = Run(model, provider, random_ids(model, batch, length))
    run.prefill(in_parts=batch > 1)
    return run


def beside_snapkv(slug: str, bench: Bench, **fields: Any) -> Record:  # noqa: ANN401 - as for `ours`
    """A step beside one of snapkv, which grows, at the same budget: both graphed, on a CPU both eager."""
    budget, length, graphed = _budget(bench), _length(bench, SHORT), bench.device.type == "cuda"
    for name in (slug, "snapkv") if graphed else ():
        if not recordable(name, budget, bench.device):
            return {"value": None, "note": f"the step of {name} cannot be recorded as a CUDA graph"}
    both = ours(slug, budget, graphed=graphed, **fields), ours("snapkv", budget, graphed=graphed)
    runs = [prefilled(bench, provider, length) for provider in both]
    mine, plain = steps_in_turns(runs, ROUNDS, TOKENS)
    times = f"{spread(mine).p50:.2f} ms against {spread(plain).p50:.2f} ms of snapkv"
    held = " and ".join(f"{run.held_bytes / 2**20:.1f}" for run in runs)
    how = "graphed" if graphed else "eager"
    note = f"{how}, {times}, {held} MiB held, budget {budget} after {length} tokens"
    return _ratio(paired_ratio(mine, plain), note)


def share_of_bound(slug: str, budget: int | None, length: int, batch: int, bench: Bench) -> Record:
    """The time in which a step's bytes could be read over the step's time.

    A step that cannot be recorded waits for Python's launches: of that one it is the time the device is busy.
    """
    length, batch = _length(bench, length), max(1, batch // bench.scale)
    budget = budget and _budget(bench)
    graphed = recordable(slug, budget, bench.device)
    run = prefilled(bench, ours(slug, budget, graphed=graphed), length, batch)
    times = run.decode(TOKENS * ROUNDS)
    looked, step = {} if graphed else run.profiled(PROFILED), f"{spread(times).p50:.2f} ms"
    if looked:
        times, step = [looked["busy_ms"]], f"{looked['busy_ms']:.2f} ms of the device in steps of {step}"
    read, shape = run.held_bytes - run.spare_bytes, shape_of(bench.built.model)
    shares = spread([bench.share_of_limit(ms, read) for ms in times])
    full = 2 * batch * length * shape.layers * shape.kv_heads * shape.head_dim * shape.dtype.itemsize
    allowed = (bench.built.bytes_read + full) / (bench.built.bytes_read + read)
    how = f"{'graphed' if graphed else 'eager'}, batch {batch} after {length} tokens"
    allow = f"its bytes allow {shares.p50 * spread(times).p50:.2f} ms"
    note = f"{how}: {step}, {allow}; a step of the full cache has {allowed:.1f}x its bytes"
    return _ratio(shares, note)


@torch.inference_mode()
def attention_of_many(bench: Bench) -> Record:
    """Attention of a batch over full prompts, by PyTorch, over the same on what a budget keeps of them, by ours.

    PyTorch's is the faster of two: the query heads of a group as heads, or as rows of their KV head.
    """
    shape, length = shape_of(bench.built.model), _length(bench, SHORT)
    batch, budget = max(1, TOGETHER // bench.scale), _budget(bench)
    draw = partial(torch.randn, dtype=shape.dtype, device=bench.device)

    def timed(kept: int, attend: Callable[..., object]) -> Spread:
        stored = batch, shape.kv_heads, kept, shape.head_dim
        sets = sets_of_inputs(2 * shape.dtype.itemsize * math.prod(stored), bench.device)
        queries = draw(batch, shape.query_heads, 1, shape.head_dim)
        calls = [partial(attend, queries, draw(*stored), draw(*stored)) for _ in range(sets)]
        calls[0]()
        return time_calls(calls, bench.device)

    def as_rows(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        rows = queries.view(batch, shape.kv_heads, -1, shape.head_dim)
        return F.scaled_dot_product_attention(rows, keys, values)

    as_heads = partial(F.scaled_dot_product_attention, enable_gqa=True)
    full = min((timed(length, attend) for attend in (as_heads, as_rows)), key=attrgetter("p50"))
    ours_of = partial(decode_attention, query_positions=None, key_positions=None, scaling=shape.head_dim**-0.5)
    kept = timed(budget, partial(ours_of, packed=True))
    ratio = Spread(full.p50 / kept.p50, full.p20 / kept.p80, full.p80 / kept.p20, kept.runs)
    words = f"{1e3 * full.p50:.0f} us of {length} tokens against {1e3 * kept.p50:.0f} us of {budget}, batch {batch}"
    return _ratio(ratio, f"{words}; the bytes allow {length / budget:.1f}x")


# --- evictions -------------------------------------------------------------------------------------------------------
class TimedEvictions(Evictions):
    """Evictions whose own time is taken, scores and statistics included."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._clock = Clock(device)

    def add(self, *layer: Any) -> None:  # noqa: ANN401 - what a cache hands over
        self._clock.mark()
        super().add(*layer)
        self._clock.mark()

    def end_call(self) -> None:
        self._clock.mark()
        super().end_call()
        self._clock.mark()

    def ms(self) -> float:
        """Milliseconds of all of them: every other lap."""
        return sum(self._clock.laps()[::2])


def evictions(slug: str, bench: Bench) -> list[tuple[float, float]]:
    """Milliseconds of a 32k prompt's prefills, and of their evictions, after one that warms up."""
    model, length = bench.built.model, _length(bench, MIDDLE)
    provider, timed = ours(slug, _budget(bench), schedule="prompt"), list[TimedEvictions]()

    def cache(*how: Any) -> KVCache:  # noqa: ANN401 - as a provider's
        made = provider.cache(*how)
        assert isinstance(made, KVCache)
        made._evictions = made._attention.evictions = TimedEvictions(bench.device)
        timed.append(made._evictions)
        return made

    run = Run(model, replace(provider, cache=cache), random_ids(model, 1, length))
    prefills = [run.prefill() for _ in range(PREFILLS + 1)]
    return [(ms, evicted.ms()) for ms, evicted in zip(prefills, timed, strict=True)][1:]


def eviction_share(slug: str, bench: Bench) -> Record:
    """What the evictions of a 32k prefill take, over the rest of it."""
    found = evictions(slug, bench)
    share = spread([evicting / (ms - evicting) for ms, evicting in found])
    times = " of ".join(f"{spread(times).p50:.1f}" for times in ([e for _, e in found], [ms for ms, _ in found]))
    return _ratio(share, f"{times} ms")


def column_sums(bench: Bench) -> Record:
    """What h2o's sums over all rows and its eviction take in a 32k prefill, over the attention alone."""
    found = evictions("h2o", bench)
    attention = attention_ms(bench, _length(bench, MIDDLE))
    ratio = spread([evicting / attention for _, evicting in found])
    return _ratio(ratio, f"attention of all layers alone {attention:.0f} ms of {spread([m for m, _ in found]).p50:.0f}")


def attention_ms(bench: Bench, length: int) -> float:
    """Milliseconds of the causal attention of all layers over a prompt, by PyTorch's own kernel: the median."""
    shape = shape_of(bench.built.model)
    heads = shape.query_heads, shape.kv_heads, shape.kv_heads
    queries, keys, values = (
        torch.randn(1, length, n, shape.head_dim, dtype=shape.dtype, device=bench.device).transpose(1, 2) for n in heads
    )
    call = partial(F.scaled_dot_product_attention, queries, keys, values, is_causal=True, enable_gqa=True)
    call()
    return shape.layers * time_calls([call], bench.device).p50


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


def sweep_round(bench: Bench) -> Record:
    """One round of the sweep's 36 variants after a prompt of 8k."""
    variants = variants_of(replace(bench, settings=replace(bench.settings, policies=None)))
    record = one_round(bench, variants, _length(bench, SHORT), scaled(NEW, bench.scale, 4))
    rows, lone = (seconds_of(record[side]) for side in ("rows", lone_side(variants)))
    note = f"{rows:.2f} s against {lone:.2f} s; {record['equal_answers']} of {len(variants)} answers equal"
    return {"value": rows / lone, "note": note}
