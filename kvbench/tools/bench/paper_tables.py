"""The papers' efficiency tables as protocols, and one of our own: how figures follow from what a cell measured."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from kvbench.config.presets import make_policy
from kvbench.tools.bench.bench import Bench, Row
from kvbench.tools.bench.clock import spread
from kvbench.tools.bench.generating import GeneratingProtocol, Method, Point, Sizes
from kvbench.tools.bench.journal import Record
from kvbench.tools.bench.providers import shape_of
from kvbench.tools.cache_bytes import limit_bits

GIB = 2**30


# --- figures ---------------------------------------------------------------------------------------------------------
def latency_rows(bench: Bench, protocol: GeneratingProtocol, points: list[Point]) -> Iterator[Row]:
    """CAKE, table 13: seconds of prefill, decoding and both, and milliseconds per token."""
    for point in points:
        row = partial(protocol.row, bench, point, f"latency_prompt{point.sizes.prompt}_gen{point.sizes.new}")
        if not point.fits:
            yield row("decode_ms_per_token", None)
            continue
        yield row("total_seconds", point.seconds)
        yield _prefill(row, point)
        yield row("decode_seconds", point.sizes.new * point.ms / 1e3)
        yield _step(bench, row, point, "decode_ms_per_token")


def _prefill(row: partial[Row], point: Point) -> Row:
    s = spread([ms / 1e3 for ms in point.record["prefill_ms"]])
    return row("prefill_seconds", s.p50, **s.as_dict())


def _step(bench: Bench, row: partial[Row], point: Point, metric: str, per_ms: float = 1.0) -> Row:
    """The time of a step, in milliseconds times `per_ms`, with the share of what the device's bandwidth allows."""
    sides = spread([ms * per_ms for ms in point.record["decode_ms"]]).as_dict()
    read = point.record["held_bytes"] - point.record["spare_bytes"]
    share = bench.share_of_limit(point.ms, read, point.record)
    return row(metric, point.ms * per_ms, share_of_limit=share, **sides)


def memory_rows(bench: Bench, protocol: GeneratingProtocol, points: list[Point]) -> Iterator[Row]:
    """CAKE, figure 7: the peak of memory and the time of a step, each beside the full cache's."""
    full = {p.sizes: p for p in points if p.method == "full"}
    for point in points:
        total = point.sizes.prompt + point.sizes.new
        length = f"{total // 1024}k" if total % 1024 == 0 else f"{total}"
        memory = partial(protocol.row, bench, point, f"memory_prompt{length}")
        latency = partial(protocol.row, bench, point, f"latency_prompt{length}")
        if not point.fits:
            yield memory("peak_memory_gib", None)
            continue
        yield from _peaks(memory, point)
        yield _step(bench, latency, point, "decode_ms_per_token")
        whole = full.get(point.sizes)
        if whole is not None and whole.fits and point.method != "full":
            mine, theirs, what = _comparable(point.record, whole.record)
            yield memory("peak_memory_reduction_percent", 100 * (1 - mine / theirs), note=what)
            yield latency("decode_speedup_x", whole.ms / point.ms)


def _peaks(row: partial[Row], point: Point) -> Iterator[Row]:
    record = point.record
    if record["peak_prefill_bytes"] is not None:
        yield row("peak_prefill_gib", record["peak_prefill_bytes"] / GIB)
        yield row("peak_decode_gib", record["peak_decode_bytes"] / GIB)
        yield row("peak_memory_gib", _peak(record) / GIB)
    yield row("held_gib", record["held_bytes"] / GIB, note=_held(point))


def _peak(record: Record) -> float:
    return float(max(record["peak_prefill_bytes"], record["peak_decode_bytes"]))


def _held(point: Point) -> str:
    """What stands behind bytes held: when they were counted, and how many of them are room for tokens to come."""
    spare = point.record["spare_bytes"] / point.record["held_bytes"]
    beside = f", {spare:.0%} of it room for tokens to come" if spare else ""
    return f"after {point.timed} of {point.sizes.new} new tokens{beside}"


def _comparable(mine: Record, full: Record) -> tuple[float, float, str]:
    """Two peaks of the same kind, and which kind: the device's memory, or, where it does not count, the bytes held."""
    if mine["peak_prefill_bytes"] is not None:
        return _peak(mine), _peak(full), "of the device's memory, weights included"
    what = "of the bytes the cache holds: this device does not count its memory"
    return mine["held_bytes"], full["held_bytes"], what


def throughput_rows(bench: Bench, protocol: GeneratingProtocol, points: list[Point]) -> Iterator[Row]:
    """D2O, table 5: the largest batch and the tokens per second at it; every batch, and per sequence, beside them."""
    yield from _at_every_batch(bench, protocol, points)
    best = _largest(points)
    for (method, size), point in best.items():
        row = partial(protocol.row, bench, point, _throughput_task(protocol, size))
        yield row("max_batch_size", point.batch, note="of the batches tried")
        note = f"at batch {point.batch}; {point.timed} of {size.new} new tokens timed"
        yield row("tokens_per_s", point.tokens_per_s, note=note)
        yield row("tokens_per_s_per_sequence", point.tokens_per_s / point.batch, note=note)
        full = best.get(("full", size))
        if full is not None and method != "full":
            note = f"batch {point.batch} against full at batch {full.batch}"
            yield row("speedup_x_vs_full", point.tokens_per_s / full.tokens_per_s, note=note)


def _throughput_task(protocol: GeneratingProtocol, size: Sizes) -> str:
    form = "throughput_in{}_out{}" if protocol.paper == "ott" else "throughput_{}_{}"
    return form.format(size.prompt, size.new)


def _at_every_batch(bench: Bench, protocol: GeneratingProtocol, points: list[Point]) -> Iterator[Row]:
    for point in points:
        row, b = partial(protocol.row, bench, point, _throughput_task(protocol, point.sizes)), point.batch
        if not point.fits:
            yield row(f"tokens_per_s_batch{b}", None)
            continue
        yield row(f"tokens_per_s_batch{b}", point.tokens_per_s)
        yield row(f"tokens_per_s_per_sequence_batch{b}", point.tokens_per_s / b)
        yield _step(bench, row, point, f"decode_ms_per_step_batch{b}")
        yield row(f"held_gib_batch{b}", point.record["held_bytes"] / GIB, note=_held(point))
        if point.record["peak_decode_bytes"] is not None:
            yield row(f"peak_decode_gib_batch{b}", point.record["peak_decode_bytes"] / GIB)


def _largest(points: list[Point]) -> dict[tuple[str, Sizes], Point]:
    """The largest batch that fitted, for each method and line of the table: batches come in order."""
    return {(point.method, point.sizes): point for point in points if point.fits}


def answer_rows(bench: Bench, protocol: GeneratingProtocol, points: list[Point]) -> Iterator[Row]:
    """D2O, table 12: the seconds of an answer, of its prefill, and of one token."""
    for point in points:
        row = partial(protocol.row, bench, point, f"latency_{point.sizes.prompt}_{point.sizes.new}")
        if not point.fits:
            yield row("seconds_per_token", None)
            continue
        yield row("total_seconds", point.seconds)
        yield _prefill(row, point)
        yield _step(bench, row, point, "seconds_per_token", 1e-3)
        yield row("prefill_percent_of_total", 100 * point.prefill_seconds / point.seconds)


def quantised_rows(bench: Bench, protocol: GeneratingProtocol, points: list[Point]) -> Iterator[Row]:
    """OTT, figure 3: throughput and memory against the batch; the ratio at the largest batch all can have."""
    yield from _at_every_batch(bench, protocol, points)
    by_batch = {(p.method, p.batch): p for p in points if p.fits}
    for (method, size), point in _largest(points).items():
        task = _throughput_task(protocol, size)
        yield protocol.row(bench, point, task, "max_batch_size", point.batch, note="of the batches tried")
        common = [b for (other, b) in by_batch if other == "full" != method and (method, b) in by_batch]
        if common:
            mine, full = (by_batch[who, max(common)] for who in (method, "full"))
            ratio = mine.tokens_per_s / full.tokens_per_s
            note = f"at batch {max(common)}, the largest that both fit in"
            yield protocol.row(bench, mine, task, "throughput_ratio_vs_full", ratio, note=note)
        if point.bits is not None:
            bits = limit_bits(make_policy(method), shape_of(bench.built.model))
            note = "what a further token takes in a long cache, against 16 bits per number"
            yield protocol.row(bench, point, "longest_sentence", "kv_compression_ratio", 16 / bits, note=note)


def step_rows(bench: Bench, protocol: GeneratingProtocol, points: list[Point]) -> Iterator[Row]:
    """Our own: a step's milliseconds, and what the device did of them."""
    for point in points:
        row = partial(protocol.row, bench, point, f"step_after_{point.sizes.prompt}")
        if not point.fits:
            yield row("decode_ms_per_token", None)
            continue
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
        table_rows=latency_rows,
        pictured=(("prefill_seconds", "seconds of prefill"), ("decode_ms_per_token", "ms per decoded token")),
    ),
    _cake(
        name="cake_fig7",
        table="fig7_text",
        table_rows=memory_rows,
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
        table_rows=throughput_rows,
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
        table_rows=answer_rows,
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
        table_rows=quantised_rows,
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
        table_rows=step_rows,
        pictured=(("decode_ms_per_token", "ms per decoded token"),),
        repeats=1,
        profiled=True,
        usual_rivals=("transformers_sdpa", "transformers_flash2", "transformers_compiled"),
    ),
)
