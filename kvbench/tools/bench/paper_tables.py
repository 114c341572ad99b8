"""The papers' efficiency tables as protocols, and one of our own: how figures follow from what a cell measured."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from kvbench.config.presets import make_policy
from kvbench.tools.bench.bench import Bench, Row
from kvbench.tools.bench.clock import spread
from kvbench.tools.bench.generating import GeneratingProtocol, Method, Point, Sizes
from kvbench.tools.bench.providers import shape_of
from kvbench.tools.cache_bytes import limit_bits

GIB = 2**30


# --- figures ---------------------------------------------------------------------------------------------------------
def _prefill(row: partial[Row], point: Point) -> Row:
    return row("prefill_seconds", point.prefill.p50, **point.prefill.as_dict())


def _step(bench: Bench, row: partial[Row], point: Point, metric: str, per_ms: float = 1.0) -> Row:
    """The time of a step, in milliseconds times `per_ms`, with the share of what the device's bandwidth allows."""
    sides = spread([ms * per_ms for ms in point.record["decode_ms"]]).as_dict()
    read = point.record["held_bytes"] - point.record["spare_bytes"]
    share = bench.share_of_limit(point.ms, read, point.record)
    return row(metric, point.ms * per_ms, share_of_limit=share, **sides)


def _held(row: partial[Row], point: Point, metric: str = "held_gib") -> Row:
    """Bytes held; the note says when they were counted, and how many of them are room for tokens to come."""
    held = point.record["held_bytes"]
    spare = f", {point.record['spare_bytes'] / held:.0%} of it room for tokens to come"
    note = f"after {point.timed} of {point.sizes.new} new tokens{spare if point.record['spare_bytes'] else ''}"
    return row(metric, held / GIB, note=note)


def latency(bench: Bench, row: partial[Row], point: Point) -> Iterator[Row]:
    """CAKE, table 13: seconds of prefill, decoding and both, and milliseconds per token."""
    yield row("total_seconds", point.seconds)
    yield _prefill(row, point)
    yield row("decode_seconds", point.sizes.new * point.ms / 1e3)
    yield _step(bench, row, point, "decode_ms_per_token")


LATENCY = "latency_prompt{total}"


def memory(bench: Bench, row: partial[Row], point: Point) -> Iterator[Row]:
    """CAKE, figure 7: the peak of memory and the time of a step."""
    if point.peak is not None:
        yield row("peak_prefill_gib", point.record["peak_prefill_bytes"] / GIB)
        yield row("peak_decode_gib", point.record["peak_decode_bytes"] / GIB)
        yield row("peak_memory_gib", point.peak / GIB)
    yield _held(row, point)
    yield _step(bench, partial(row, task=LATENCY), point, "decode_ms_per_token")


def beside_full(bench: Bench, row: partial[Row], points: list[Point]) -> Iterator[Row]:
    """CAKE, figure 7: memory saved and speed gained over the full cache.

    Memory is the device's or, where it does not count its own, the bytes held.
    """
    full = {p.sizes: p for p in points if p.method == "full" and p.fits}
    for point in points:
        whole = full.get(point.sizes)
        if whole is None or not point.fits or point.method == "full":
            continue
        mine, theirs, what = point.peak, whole.peak, "of the device's memory, weights included"
        if mine is None or theirs is None:
            mine, theirs = point.record["held_bytes"], whole.record["held_bytes"]
            what = "of the bytes the cache holds: this device does not count its memory"
        yield row(point, "peak_memory_reduction_percent", 100 * (1 - mine / theirs), note=what)
        yield row(point, "decode_speedup_x", whole.ms / point.ms, task=LATENCY)


def throughput(bench: Bench, row: partial[Row], point: Point) -> Iterator[Row]:
    """D2O, table 5, and OTT, figure 3: every batch, and per sequence."""
    b = point.batch
    yield row(f"tokens_per_s_batch{b}", point.tokens_per_s)
    yield row(f"tokens_per_s_per_sequence_batch{b}", point.tokens_per_s / b)
    yield _step(bench, row, point, f"decode_ms_per_step_batch{b}")
    yield _held(row, point, f"held_gib_batch{b}")
    if point.record["peak_decode_bytes"] is not None:
        yield row(f"peak_decode_gib_batch{b}", point.record["peak_decode_bytes"] / GIB)


def _largest(points: list[Point]) -> dict[tuple[str, Sizes], Point]:
    """The largest batch that fitted, for each method and line of the table: batches come in order."""
    return {(point.method, point.sizes): point for point in points if point.fits}


def at_largest(bench: Bench, row: partial[Row], points: list[Point]) -> Iterator[Row]:
    """D2O, table 5: the largest batch, and the tokens per second at it."""
    best = _largest(points)
    for (method, size), point in best.items():
        yield row(point, "max_batch_size", point.batch, note="of the batches tried")
        note = f"at batch {point.batch}; {point.timed} of {size.new} new tokens timed"
        yield row(point, "tokens_per_s", point.tokens_per_s, note=note)
        yield row(point, "tokens_per_s_per_sequence", point.tokens_per_s / point.batch, note=note)
        full = best.get(("full", size))
        if full is not None and method != "full":
            note = f"batch {point.batch} against full at batch {full.batch}"
            yield row(point, "speedup_x_vs_full", point.tokens_per_s / full.tokens_per_s, note=note)


def quantised(bench: Bench, row: partial[Row], points: list[Point]) -> Iterator[Row]:
    """OTT, figure 3: the ratio at the largest batch all can have, and what codes save."""
    by_batch = {(p.method, p.batch): p for p in points if p.fits}
    for (method, _), point in _largest(points).items():
        yield row(point, "max_batch_size", point.batch, note="of the batches tried")
        common = [b for (other, b) in by_batch if other == "full" != method and (method, b) in by_batch]
        if common:
            mine, full = (by_batch[who, max(common)] for who in (method, "full"))
            note = f"at batch {max(common)}, the largest that both fit in"
            yield row(mine, "throughput_ratio_vs_full", mine.tokens_per_s / full.tokens_per_s, note=note)
        if point.bits is not None:
            bits = limit_bits(make_policy(method), shape_of(bench.built.model))
            note = "what a further token takes in a long cache, against 16 bits per number"
            yield row(point, "kv_compression_ratio", 16 / bits, note=note, task="longest_sentence")


def answers(bench: Bench, row: partial[Row], point: Point) -> Iterator[Row]:
    """D2O, table 12: the seconds of an answer, of its prefill, and of one token."""
    yield row("total_seconds", point.seconds)
    yield _prefill(row, point)
    yield _step(bench, row, point, "seconds_per_token", 1e-3)
    yield row("prefill_percent_of_total", 100 * point.prefill_seconds / point.seconds)


def steps(bench: Bench, row: partial[Row], point: Point) -> Iterator[Row]:
    """Our own: a step's milliseconds, and what the device did of them."""
    yield _step(bench, row, point, "decode_ms_per_token")
    if "busy_ms" in point.record:
        busy = point.record["busy_ms"]
        yield row("device_busy_ms", busy, note=f"{busy / point.ms:.0%} of the step")
        yield row("launches", point.record["launches"], note="kernels and copies")


# --- the tables ------------------------------------------------------------------------------------------------------
_cake = partial(
    GeneratingProtocol,
    paper="cake",
    model="mistral_7b_instruct_v03",
    methods=(Method("full"), Method("snapkv", 1024), Method("pyramidkv", 1024), Method("cake", 1024)),
    sizes=tuple(Sizes(length, 1024) for length in (7168, 15360, 31744, 64512, 130048)),
    shared="cake_lengths",
    usual_rivals=("transformers_sdpa", "transformers_flash2", "transformers_compiled", "kvpress_snapkv"),
)

PROTOCOLS = (
    _cake(
        name="cake_table13",
        table="table13",
        task="latency_prompt{prompt}_gen{new}",
        figure="decode_ms_per_token",
        of_point=latency,
        pictured=(("prefill_seconds", "seconds of prefill"), ("decode_ms_per_token", "ms per decoded token")),
    ),
    _cake(
        name="cake_fig7",
        table="fig7_text",
        task="memory_prompt{total}",
        figure="peak_memory_gib",
        of_point=memory,
        of_all=beside_full,
        pictured=(
            ("peak_memory_gib", "GiB at the peak"),
            ("held_gib", "GiB held by the cache"),
            ("decode_ms_per_token", "ms per decoded token"),
        ),
    ),
    GeneratingProtocol(
        name="d2o_table5",
        paper="d2o",
        table="table5",
        model="llama3_8b",
        methods=(Method("full"), Method("h2o", "prompt"), Method("d2o", "prompt")),
        sizes=(
            Sizes(256, 1024, (8, 32, 128, 256)),
            Sizes(512, 2048, (4, 16, 64, 128)),
            Sizes(1024, 4096, (2, 8, 32, 64)),
            Sizes(2048, 8192, (1, 4, 16, 32)),
        ),
        task="throughput_{prompt}_{new}",
        figure="tokens_per_s_batch{batch}",
        of_point=throughput,
        of_all=at_largest,
        pictured=(("tokens_per_s", "tokens/s of all sequences"), ("tokens_per_s_per_sequence", "tokens/s of each")),
        timed=32,
        repeats=1,
        middle=True,
        usual_rivals=("transformers_sdpa",),
        axis="batch",
    ),
    GeneratingProtocol(
        name="d2o_table12",
        paper="d2o",
        table="table12",
        model="llama3_8b",
        methods=(Method("full"), Method("h2o", 256), Method("d2o", 256)),
        sizes=tuple(Sizes(length, 2 * length) for length in (256, 512, 1024, 2048)),
        task="latency_{prompt}_{new}",
        figure="seconds_per_token",
        of_point=answers,
        pictured=(("seconds_per_token", "seconds per token"),),
        repeats=3,
        middle=True,
        rival_budget=256,
    ),
    GeneratingProtocol(
        name="ott_fig3",
        paper="ott",
        table="fig3_text",
        model="llama2_7b_chat",
        methods=(Method("full"), Method("kivi_g128_r128", None, 2), Method("ott_g128_r32", None, 2)),
        sizes=(Sizes(64, 384, (1, 8, 32, 64, 128, 192, 256)),),
        task="throughput_in{prompt}_out{new}",
        figure="tokens_per_s_batch{batch}",
        of_point=throughput,
        of_all=quantised,
        pictured=(
            ("tokens_per_s", "tokens/s of all sequences"),
            ("held_gib", "GiB held by the cache"),
            ("peak_decode_gib", "GiB at the peak of decoding"),
        ),
        timed=32,
        repeats=1,
        middle=True,
        usual_rivals=("transformers_sdpa", "quanto_int2", "hqq_int4"),
        axis="batch",
    ),
    GeneratingProtocol(
        name="steps",
        paper="kvbench",
        table="steps",
        model="llama31_8b_instruct",
        methods=tuple(
            Method(slug, None if slug == "full" else 1024) for slug in ("full", "h2o", "tova", "caote_snapkv")
        ),
        sizes=(Sizes(8192, 64),),
        task="step_after_{prompt}",
        figure="decode_ms_per_token",
        of_point=steps,
        pictured=(("decode_ms_per_token", "ms per decoded token"),),
        repeats=1,
        profiled=True,
        usual_rivals=("transformers_sdpa", "transformers_flash2", "transformers_compiled"),
    ),
)
