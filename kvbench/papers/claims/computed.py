"""Claims that are arithmetic on published numbers, or on what our own code computes: `compute` of a claims.yaml."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean

from kvbench.config.presets import make_policy
from kvbench.models.cache_shapes import cache_shape
from kvbench.papers.claims.claim import DIGITS, Cell
from kvbench.papers.published import read_table
from kvbench.policies.allocators.pyramid import Pyramid
from kvbench.tools.cache_bytes import limit_bits, predict


def values(table: str, **fields: object) -> dict[tuple[str, str], float]:
    """Numbers of a table by (method, task), of those whose fields are as given."""
    chosen = [n for n in read_table(table) if all(getattr(n, name) == value for name, value in fields.items())]
    found = {(number.method, number.task): number.value for number in chosen}
    assert len(found) == len(chosen) > 0, f"{table}: {fields} leave {len(chosen)} numbers for {len(found)} cells"
    return found


# --- CAOTE ----------------------------------------------------------------------------------------------------------
def smaller_blocks() -> list[Cell]:
    """CAOTE with blocks of 32 tokens less CAOTE with blocks of 128, per base and task."""
    small, large = values("caote/table6_block32"), values("caote/table6_block128")
    return [
        Cell(f"table6 {method} {task}: m=32 {value}, m=128 {other}:", round(value - other, DIGITS))
        for (method, task), value in small.items()
        if method.startswith("caote_") and (other := large.get((method, task))) is not None
    ]


# --- CAKE -----------------------------------------------------------------------------------------------------------
LAYERS, WINDOW, PROMPT = 32, 32, 8192
LONGEST = "latency_prompt130048_gen1024"


def pyramid_overspend() -> list[Cell]:
    """By how many percent the released PyramidKV's whole-number slopes hold more than they are asked to."""
    cells = []
    for budget in (64, 128, 256, 512, 1024, 2048):
        held, exact = (
            sum(Pyramid(rounding=rounding).split(budget * LAYERS, LAYERS, PROMPT, WINDOW))
            for rounding in ("official", "webster")
        )
        more = 100 * (held - exact) / (exact - WINDOW * LAYERS)  # the window is kept in every layer, beside the budget
        where = f"budget {budget}: {held} slots against {exact} ({100 * (held / exact - 1):+.1f}%), beside the window"
        cells.append(Cell(where, round(more, DIGITS)))
    return cells


def decoding_speedup() -> list[Cell]:
    """How many times as fast as the full cache a token is decoded after 130,048 tokens."""
    ms = values("cake/table13", metric="decode_ms_per_token", task=LONGEST)
    full, cake = ms["full", LONGEST], ms["cake", LONGEST]
    return [Cell(f"table13 {full} ms against {cake} ms: times", round(full / cake, DIGITS), 10.0)]


def flat_decoding() -> list[Cell]:
    """CAKE's time per token at each length relative to that after 7,168 tokens, in percent."""
    ms = values("cake/table13", metric="decode_ms_per_token", method="cake")
    first = ms["cake", "latency_prompt7168_gen1024"]
    return [
        Cell(f"table13 {task}: {value} ms", round(100 * (value / first - 1), DIGITS), -5.0, 5.0)
        for (_, task), value in ms.items()
    ]


# --- K-VEC ----------------------------------------------------------------------------------------------------------
def coverage_drops() -> list[Cell]:
    """How much less coverage K-VEC loses than each other method at each rate; minus signs are not always printed."""
    cells = []
    for rate in (0.75, 0.5, 0.25, 0.1):
        drops = values("kvec/table7", budget=rate)
        for (method, task), value in drops.items():
            own = drops["kvec", task]
            where = f"table7 eviction rate {1 - rate:g}: kvec {own}, {method} {value}:"
            cells += [Cell(where, round(abs(value) - abs(own), DIGITS))] if method != "kvec" else []
    return cells


def speeds() -> list[Cell]:
    """K-VEC's tokens per second relative to SnapKV's, in percent: prefill, decode and total."""
    speed = values("kvec/table8", metric="tokens_per_s")
    cells = []
    for phase in ("prefill", "decode", "total"):
        own, other = speed["kvec", phase], speed["snapkv", phase]
        where = f"table8 {phase}: kvec {own}, snapkv {other} tokens/s:"
        cells.append(Cell(where, round(100 * (own / other - 1), DIGITS), -10.0))
    return cells


def overheads() -> list[Cell]:
    """Seconds of overhead of K-VEC over SnapKV lost from each output length to the next."""
    seconds = values("kvec/table9")
    cells = []
    for tokens in (500, 1000, 2000):
        tasks = {out: f"latency_in{tokens}_out{out}" for out in (100, 200, 300)}
        overhead = {out: round(seconds["kvec", t] - seconds["snapkv", t], DIGITS) for out, t in tasks.items()}
        for (short, before), (long, after) in pairwise(overhead.items()):
            where = f"table9 {tokens} in, {short} to {long} out: {before:+.2f} to {after:+.2f} s:"
            cells.append(Cell(where, round(before - after, DIGITS)))
    return cells


# --- D2O ------------------------------------------------------------------------------------------------------------
def per_sequence() -> list[Cell]:
    """D2O's tokens per second and sequence less the full cache's: table 5 divided by its batches."""
    speed, batch = values("d2o/table5", metric="tokens_per_s"), values("d2o/table5", metric="max_batch_size")
    cells = []
    for task in dict.fromkeys(task for _, task in speed):
        own, full = (speed[method, task] / batch[method, task] for method in ("d2o", "full"))
        sizes = f"batch {batch['d2o', task]:g} against {batch['full', task]:g}"
        where = f"table5 {task}, {sizes}: {own:.1f} against {full:.1f} tokens/s a sequence:"
        cells.append(Cell(where, round(own - full, DIGITS)))
    return cells


def whole_batch() -> list[Cell]:
    """D2O's tokens per second over the full cache's as printed, each at its own batch."""
    speed = values("d2o/table5", metric="tokens_per_s")
    pairs = {task: (speed["d2o", task], speed["full", task]) for _, task in speed}
    return [Cell(f"table5 {task}: {own} / {full}:", own / full, 2.0) for task, (own, full) in pairs.items()]


# --- OTT ------------------------------------------------------------------------------------------------------------
GSM = ("gsm8k_8shot", "gsm8k_8shot_cot")
CLAIMED_RATIO = 6.4


def residual_steps() -> list[Cell]:
    """Accuracy gained from each residual length to the next, at every group size."""
    score = values("ott/table3")
    return [
        Cell(
            f"table3 G={group} R={low} to {high} {task}:",
            round(score[f"ott_g{group}_r{high}", task] - score[f"ott_g{group}_r{low}", task], DIGITS),
        )
        for group in (32, 64, 128)
        for task in GSM
        for low, high in pairwise((0, 8, 16, 32, 64, 128))
    ]


def one_is_enough() -> list[Cell]:
    """Share of the gain of three traced tokens that one gives, in percent."""
    score = values("ott/table4_outlier_num")
    cells = []
    for task in GSM:
        none, one, three = (score[f"ott_g128_r32_n{n}", task] for n in (0, 1, 3))
        where = f"table4 {task}: n=0 {none}, n=1 {one}, n=3 {three}:"
        cells.append(Cell(where, round(100 * (one - none) / (three - none), DIGITS), 80.0))
    return cells


def memory_ratio() -> list[Cell]:
    """A 16-bit cache over ours, in the limit and at 8,192 tokens: bytes as our stores hold them, scales in 16 bits."""
    shape = cache_shape("llama2_7b_chat")
    cells = []
    for slug in ("kivi", "ott"):
        policy = make_policy(slug)
        ratios = {"in the limit": 16 / limit_bits(policy, shape), "at 8192 tokens": predict(policy, shape, 8192).ratio}
        cells += [
            Cell(f"{slug} {where}:", round(ratio, DIGITS), 0.97 * CLAIMED_RATIO, 1.03 * CLAIMED_RATIO)
            for where, ratio in ratios.items()
        ]
    return cells


def zipcache_below_kivi() -> list[Cell]:
    """KIVI's mean over the eight columns of table 8 less ZipCache's, from the rows themselves."""
    kivi, zipcache = (
        fmean(n.value for n in read_table("ott/table8") if n.method == own and n.task != "avg")
        for own in ("kivi_g128_r128", "zipcache_k0.8_v0.8")
    )
    where = f"table8 row means: KIVI {kivi:.2f}, ZipCache {zipcache:.2f}:"
    return [Cell(where, round(kivi - zipcache, DIGITS))]
