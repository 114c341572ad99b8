"""What kvbench promises on a GPU, each promise with its figure, its bound, and whether it was met.

Ratios are taken between providers that take turns, a few tokens at a time, where two caches fit side by side.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kvbench.cache import layer as layer_module
from kvbench.cache.queue import EvictionQueue
from kvbench.report.figures.curves import Curve
from kvbench.terminal.errors import UsageError
from kvbench.tools.bench import rivals
from kvbench.tools.bench.bench import Bench, Row
from kvbench.tools.bench.clock import Clock, Spread, paired_ratio, spread
from kvbench.tools.bench.generating import LEAST_BUDGET, LEAST_LENGTH
from kvbench.tools.bench.generation import Job, Run, measure
from kvbench.tools.bench.journal import Cell, Record, attempt
from kvbench.tools.bench.machine import release
from kvbench.tools.bench.providers import Provider, ours, random_ids
from kvbench.tools.bench.settings import scaled

TOKENS, ROUNDS = 4, 8  # decoded in a turn, and timed turns after one that warms up
BUDGET, SHORT, MIDDLE, LONG = 1024, 8192, 32768, 130048
BLOCK = 1024  # prompt tokens between two evictions of the 128k prefill
WINDOWED = ("snapkv", "pyramidkv", "ada_snapkv", "tova", "cake", "kvec", "caote_snapkv")
EVICTING = ("h2o", "tova", "roco", "cake", "d2o", "caote_snapkv")
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

    @property
    def words(self) -> str:
        return f"{'at least' if self.at_least else 'at most'} {self.bound:g}"


@dataclass(frozen=True)
class TargetsProtocol:
    """Cells are targets."""

    name: str = "targets"
    about: str = "what kvbench promises on a GPU: speed-ups, the cost of evicting, memory; each with its bound"
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

    def curves(self, bench: Bench, rows: list[Row]) -> list[Curve]:
        return []


def _row(bench: Bench, target: Target, record: Record) -> Row:
    value, sides = record.get("value"), record.get("spread") or {}
    note = record.get("note") or record.get("out_of_memory") or ""
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
        yield Target("eviction_in_32k_prefill", slug, "share of the rest of the prefill", 0.02, False, share)
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


def in_turns(runs: Sequence[Run], rounds: int = ROUNDS, tokens: int = TOKENS) -> list[list[float]]:
    """Milliseconds of a decoding step for every run and round; the first round warms up and is dropped."""
    found: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds + 1):
        for run, times in zip(runs, found, strict=True):
            times.append(statistics.mean(run.decode(tokens)))
    return [times[1:] for times in found]


def _ratio(ratio: Spread, note: str) -> Record:
    return {"value": ratio.p50, "spread": ratio.as_dict(), "note": note}


def evicting_step(slug: str, bench: Bench) -> Record:
    """A step that evicts beside one of snapkv, which grows, at the same budget."""
    budget, length = _budget(bench), _length(bench, SHORT)
    providers = ours(slug, budget, schedule="prompt", decode="evict"), ours("snapkv", budget)
    mine, grows = in_turns([prefilled(bench, provider, length) for provider in providers])
    times = f"{spread(mine).p50:.2f} ms against {spread(grows).p50:.2f} ms of snapkv"
    return _ratio(paired_ratio(mine, grows), f"{times}, budget {budget} after {length} tokens")


def ada_step(bench: Bench) -> Record:
    """ada_snapkv's step beside snapkv's: budgets per head, the same number of tokens in all."""
    budget, length = _budget(bench), _length(bench, SHORT)
    runs = [prefilled(bench, ours(slug, budget), length) for slug in ("ada_snapkv", "snapkv")]
    mine, plain = in_turns(runs)
    held = " and ".join(f"{run.held_bytes / 2**20:.1f}" for run in runs)
    return _ratio(paired_ratio(mine, plain), f"{spread(mine).p50:.2f} ms, {held} MiB held")


def long_decode(bench: Bench) -> Record:
    """The full cache's step after 128k tokens over CAKE's at its budget, beside snapkv and transformers' own cache."""
    budget, length = _budget(bench), _length(bench, LONG)
    sdpa = rivals.provider("transformers_sdpa", None, length)
    providers = (ours("cake", budget), ours("snapkv", budget), ours("full", None), sdpa)
    runs = [prefilled(bench, provider, length) for provider in providers]
    times = in_turns(runs)
    mine, _, full, _ = times
    ms = [spread(t).p50 for t in times]
    read = [bench.built.bytes_read + run.held_bytes for run in runs]
    share = bench.share_of_limit(ms[0], runs[0].held_bytes)
    note = (
        f"cake {ms[0]:.2f} ms ({share:.0%} of the limit), snapkv {ms[1]:.2f}, full {ms[2]:.2f}, "
        f"transformers' sdpa {ms[3]:.2f}; the bytes to read allow {read[2] / read[0]:.1f}x"
    )
    return _ratio(paired_ratio(full, mine), note)


@contextmanager
def watched(device: torch.device) -> Iterator[dict[str, list[Clock]]]:
    """Clocks around all layers' attention and evictions; a layer's prefill is one call of each."""
    clocks: dict[str, list[Clock]] = {"attend": [], "put": []}
    places = {"attend": layer_module, "put": EvictionQueue}
    methods = {name: getattr(place, name) for name, place in places.items()}

    def between(name: str) -> Callable[..., Any]:
        def method(*args: Any) -> Any:  # noqa: ANN401 - whatever the method takes and gives
            clock = Clock(device)
            clock.mark()
            out = methods[name](*args)
            clock.mark()
            clocks[name].append(clock)
            return out

        return method

    for name, place in places.items():
        setattr(place, name, between(name))
    try:
        yield clocks
    finally:
        for name, place in places.items():
            setattr(place, name, methods[name])


@dataclass(frozen=True)
class Parts:
    """Milliseconds of one prefill, and of all layers' attention and evictions in it."""

    whole: float
    attention: float
    eviction: float


def parts_of_prefill(bench: Bench, provider: Provider, length: int, repeats: int = 2) -> list[Parts]:
    """The parts of a few prefills, after one that warms up."""
    run = Run(bench.built.model, provider, random_ids(bench.built.model, 1, length))
    found = []
    for _ in range(repeats + 1):
        with watched(bench.device) as clocks:
            whole = run.prefill()
            attention, eviction = (sum(c.laps()[0] for c in clocks[name]) for name in ("attend", "put"))
        found.append(Parts(whole, attention, eviction))
    return found[1:]


def eviction_share(slug: str, bench: Bench) -> Record:
    """Scoring, allocation, selection and compaction of a 32k prompt over the rest of its prefill."""
    length = _length(bench, MIDDLE)
    parts = parts_of_prefill(bench, ours(slug, _budget(bench), schedule="prompt"), length)
    share = spread([p.eviction / (p.whole - p.eviction) for p in parts])
    note = f"{spread([p.eviction for p in parts]).p50:.1f} of {spread([p.whole for p in parts]).p50:.0f} ms"
    return _ratio(share, note)


def column_sums(bench: Bench) -> Record:
    """What h2o's sums over all rows take beyond the attention of the full cache, over that attention."""
    length = _length(bench, MIDDLE)
    plain = spread([p.attention for p in parts_of_prefill(bench, ours("full", None), length)]).p50
    parts = parts_of_prefill(bench, ours("h2o", _budget(bench), schedule="prompt"), length)
    ratio = spread([(p.attention + p.eviction - plain) / plain for p in parts])
    return _ratio(
        ratio, f"attention alone {plain:.0f} ms, with the sums and the eviction {plain * (1 + ratio.p50):.0f} ms"
    )


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
