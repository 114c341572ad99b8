"""The papers' efficiency tables as protocols: what they ran, and how their figures follow from what a cell measured."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from kvbench.config.presets import make_policy
from kvbench.tools.bench.about import ABOUT
from kvbench.tools.bench.bench import Bench, Row
from kvbench.tools.bench.clock import spread
from kvbench.tools.bench.generating import GeneratingProtocol, Method, Point, Sizes
from kvbench.tools.bench.providers import shape_of
from kvbench.tools.cache_bytes import limit_bits

GIB = 2**30


# --- figures ---------------------------------------------------------------------------------------------------------
def latency_rows(bench: Bench, protocol: GeneratingProtocol, points: list[Point]) -> Iterator[Row]:
    """CAKE, table 13: seconds of prefill, decoding and both, and milliseconds per token."""
    for point in points:
        task = f"latency_prompt{point.sizes.prompt}_gen{point.sizes.new}"
        if not point.fits:
            yield protocol.row(bench, point, task, "decode_ms_per_token", None)
            continue
        yield protocol.row(bench, point, task, "total_seconds", point.seconds)
        yield prefill_row(bench, protocol, point, task)
        yield protocol.row(bench, point, task, "decode_seconds", point.sizes.new * point.ms / 1e3)
        yield decode_row(bench, protocol, point, task, "decode_ms_per_token", 1.0)


def prefill_row(bench: Bench, protocol: GeneratingProtocol, point: Point, task: str) -> Row:
    s = spread([ms / 1e3 for ms in point.record["prefill_ms"]])
    return protocol.row(bench, point, task, "prefill_seconds", s.p50, **s.as_dict())


def decode_row(bench: Bench, protocol: GeneratingProtocol, point: Point, task: str, metric: str, per_ms: float) -> Row:
    """The time of a step, in milliseconds times `per_ms`, with the share of what the device's bandwidth allows."""
    sides = spread([ms * per_ms for ms in point.record["decode_ms"]]).as_dict()
    read = point.record["held_bytes"] - point.record["spare_bytes"]
    share = bench.share_of_limit(point.ms, read, point.record)
    return protocol.row(bench, point, task, metric, point.ms * per_ms, share_of_limit=share, **sides)


def memory_rows(bench: Bench, protocol: GeneratingProtocol, points: list[Point]) -> Iterator[Row]:
    """CAKE, figure 7: the peak of memory and the time of a step, each beside the full cache's."""
    full = {p.sizes: p for p in points if p.method == "full"}
    for point in points:
        thousands, rest = divmod(point.sizes.prompt + point.sizes.new, 1024)
        total = f"{thousands}k" if not rest else f"{point.sizes.prompt + point.sizes.new}"
        memory, latency = f"memory_prompt{total}", f"latency_prompt{total}"
        if not point.fits:
            yield protocol.row(bench, point, memory, "peak_memory_gib", None)
            continue
        yield from _peaks(bench, protocol, point, memory)
        yield decode_row(bench, protocol, point, latency, "decode_ms_per_token", 1.0)
        whole = full.get(point.sizes)
        if whole is not None and whole.fits and point.method != "full":
            mine, theirs, what = _comparable(point, whole)
            reduction = 100 * (1 - mine / theirs)
            yield protocol.row(bench, point, memory, "peak_memory_reduction_percent", reduction, note=what)
            yield protocol.row(bench, point, latency, "decode_speedup_x", whole.ms / point.ms)


def _peaks(bench: Bench, protocol: GeneratingProtocol, point: Point, task: str) -> Iterator[Row]:
    record = point.record
    for name in ("peak_prefill", "peak_decode"):
        if record[f"{name}_bytes"] is not None:
            yield protocol.row(bench, point, task, f"{name}_gib", record[f"{name}_bytes"] / GIB)
    if record["peak_prefill_bytes"] is not None:
        peak = max(record["peak_prefill_bytes"], record["peak_decode_bytes"])
        yield protocol.row(bench, point, task, "peak_memory_gib", peak / GIB)
    yield protocol.row(bench, point, task, "held_gib", record["held_bytes"] / GIB, note=_held(protocol, point))


def _held(protocol: GeneratingProtocol, point: Point) -> str:
    """What stands behind bytes held: when they were counted, and how many of them are room for tokens to come."""
    spare = point.record["spare_bytes"] / point.record["held_bytes"]
    beside = f", {spare:.0%} of it room for tokens to come" if spare else ""
    return f"after {point.timed} of {point.sizes.new} new tokens{beside}"


def _comparable(point: Point, whole: Point) -> tuple[float, float, str]:
    """Two peaks of the same kind, and which kind: the device's memory, or, where it does not count, the bytes held."""
    a, b = point.record, whole.record
    if a["peak_prefill_bytes"] is None:
        return a["held_bytes"], b["held_bytes"], "of the bytes the cache holds: this device does not count its memory"
    ours, theirs = (float(max(r["peak_prefill_bytes"], r["peak_decode_bytes"])) for r in (a, b))
    return ours, theirs, "of the device's memory, weights included"


def throughput_rows(bench: Bench, protocol: GeneratingProtocol, points: list[Point]) -> Iterator[Row]:
    """D2O, table 5: the largest batch and the tokens per second at it; every batch, and per sequence, beside them."""
    yield from _at_every_batch(bench, protocol, points)
    best = _largest(points)
    for (method, size), point in best.items():
        task = _throughput_task(protocol, size)
        yield protocol.row(bench, point, task, "max_batch_size", point.batch, note="of the batches tried")
        note = f"at batch {point.batch}; {point.timed} of {size.new} new tokens timed"
        yield protocol.row(bench, point, task, "tokens_per_s", point.tokens_per_s, note=note)
        each = point.tokens_per_s / point.batch
        yield protocol.row(bench, point, task, "tokens_per_s_per_sequence", each, note=note)
        full = best.get(("full", size))
        if full is not None and method != "full":
            note = f"batch {point.batch} against full at batch {full.batch}"
            yield protocol.row(
                bench, point, task, "speedup_x_vs_full", point.tokens_per_s / full.tokens_per_s, note=note
            )


def _throughput_task(protocol: GeneratingProtocol, size: Sizes) -> str:
    form = "throughput_in{}_out{}" if protocol.paper == "ott" else "throughput_{}_{}"
    return form.format(size.prompt, size.new)


def _at_every_batch(bench: Bench, protocol: GeneratingProtocol, points: list[Point]) -> Iterator[Row]:
    for point in points:
        task, b = _throughput_task(protocol, point.sizes), point.batch
        if not point.fits:
            yield protocol.row(bench, point, task, f"tokens_per_s_batch{b}", None)
            continue
        yield protocol.row(bench, point, task, f"tokens_per_s_batch{b}", point.tokens_per_s)
        yield protocol.row(bench, point, task, f"tokens_per_s_per_sequence_batch{b}", point.tokens_per_s / b)
        yield decode_row(bench, protocol, point, task, f"decode_ms_per_step_batch{b}", 1.0)
        held = point.record["held_bytes"] / GIB
        yield protocol.row(bench, point, task, f"held_gib_batch{b}", held, note=_held(protocol, point))
        if point.record["peak_decode_bytes"] is not None:
            peak = point.record["peak_decode_bytes"] / GIB
            yield protocol.row(bench, point, task, f"peak_decode_gib_batch{b}", peak)


def _largest(points: list[Point]) -> dict[tuple[str, Sizes], Point]:
    """The largest batch that fitted, for each method and line of the table."""
    best: dict[tuple[str, Sizes], Point] = {}
    for point in points:
        key = (point.method, point.sizes)
        if point.fits and (key not in best or point.batch > best[key].batch):
            best[key] = point
    return best


def answer_rows(bench: Bench, protocol: GeneratingProtocol, points: list[Point]) -> Iterator[Row]:
    """D2O, table 12: the seconds of an answer, of its prefill, and of one token."""
    for point in points:
        task = f"latency_{point.sizes.prompt}_{point.sizes.new}"
        if not point.fits:
            yield protocol.row(bench, point, task, "seconds_per_token", None)
            continue
        yield protocol.row(bench, point, task, "total_seconds", point.seconds)
        yield prefill_row(bench, protocol, point, task)
        yield decode_row(bench, protocol, point, task, "seconds_per_token", 1e-3)
        share = 100 * point.prefill_seconds / point.seconds
        yield protocol.row(bench, point, task, "prefill_percent_of_total", share)


def quantised_rows(bench: Bench, protocol: GeneratingProtocol, points: list[Point]) -> Iterator[Row]:
    """OTT, figure 3: throughput and memory against the batch; the ratio at the largest batch all can have."""
    yield from _at_every_batch(bench, protocol, points)
    by_batch = {(p.method, p.batch): p for p in points if p.fits}
    for point in _largest(points).values():
        task = _throughput_task(protocol, point.sizes)
        yield protocol.row(bench, point, task, "max_batch_size", point.batch, note="of the batches tried")
        if point.method == "full":
            continue
        common = [b for (method, b) in by_batch if method == "full" and (point.method, b) in by_batch]
        if common:
            mine, full = (by_batch[(method, max(common))] for method in (point.method, "full"))
            ratio = mine.tokens_per_s / full.tokens_per_s
            note = f"at batch {max(common)}, the largest that both fit in"
            yield protocol.row(bench, mine, task, "throughput_ratio_vs_full", ratio, note=note)
        if point.bits is not None:
            bits = limit_bits(make_policy(point.method), shape_of(bench.built.model))
            note = "what a further token takes in a long cache, against 16 bits per number"
            yield protocol.row(bench, point, "longest_sentence", "kv_compression_ratio", 16 / bits, note=note)


# --- the tables ------------------------------------------------------------------------------------------------------
_cake = partial(
    GeneratingProtocol,
    paper="cake",
    model="mistral_7b_instruct_v03",
    methods=(Method("full"), Method("snapkv", 1024), Method("pyramidkv", 1024), Method("cake", 1024)),
    sizes=tuple(Sizes(length, 1024) for length in (7168, 15360, 31744, 64512, 130048)),
    shared="cake_lengths",
    usual_rivals=("transformers_sdpa", "transformers_flash2", "kvpress_snapkv"),
)

PROTOCOLS = (
    _cake(
        name="cake_table13",
        about=ABOUT["cake_table13"],
        table="table13",
        table_rows=latency_rows,
        pictured=(("prefill_seconds", "seconds of prefill"), ("decode_ms_per_token", "ms per decoded token")),
    ),
    _cake(
        name="cake_fig7",
        about=ABOUT["cake_fig7"],
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
        about=ABOUT["d2o_table5"],
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
        timed=32,
        repeats=1,
        middle=True,
        usual_rivals=("transformers_sdpa",),
        axis="batch",
        pictured=(("tokens_per_s", "tokens/s of all sequences"), ("tokens_per_s_per_sequence", "tokens/s of each")),
    ),
    GeneratingProtocol(
        name="d2o_table12",
        about=ABOUT["d2o_table12"],
        paper="d2o",
        table="table12",
        model="llama3_8b",
        methods=(Method("full"), Method("h2o", 256), Method("d2o", 256)),
        sizes=tuple(Sizes(length, 2 * length) for length in (256, 512, 1024, 2048)),
        table_rows=answer_rows,
        repeats=3,
        middle=True,
        rival_budget=256,
        pictured=(("seconds_per_token", "seconds per token"),),
    ),
    GeneratingProtocol(
        name="ott_fig3",
        about=ABOUT["ott_fig3"],
        paper="ott",
        table="fig3_text",
        model="llama2_7b_chat",
        methods=(Method("full"), Method("kivi_g128_r128", None, 2), Method("ott_g128_r32", None, 2)),
        sizes=(Sizes(64, 384, (1, 8, 32, 64, 128, 192, 256)),),
        table_rows=quantised_rows,
        timed=32,
        repeats=1,
        middle=True,
        usual_rivals=("transformers_sdpa", "quanto_int2", "hqq_int4"),
        axis="batch",
        pictured=(
            ("tokens_per_s", "tokens/s of all sequences"),
            ("held_gib", "GiB held by the cache"),
            ("peak_decode_gib", "GiB at the peak of decoding"),
        ),
    ),
)
