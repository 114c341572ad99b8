# ruff: noqa: N803 - in kernels, sizes have the names they have in shapes
"""Selection without sorting: the slots that stay (radix select) and the one slot that goes.

Order of preference: protected tokens, then the higher score, then the higher base score (`tie_break`), then the lower
position. A row of scores lies in L2 and is read once per 8 bits of a key: first of the scores', then, among slots equal
to the cut, of the base scores', then of the positions'; where a cut falls between two keys the rest is not needed.
NaN counts as -inf, so that such a token is the first to go: no host waits to be told of it.
Shapes: B batch, H KV heads, T slots.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.jit import View, jit, next_power_of_two, of_head, require_triton, rows, tl


def best_first_ref(scores: Tensor, tie_break: Tensor | None, positions: Tensor, protected: Tensor) -> list[int]:
    """The definition, for one head's [T]: slots of stored tokens from the first to keep to the first to evict."""
    base = torch.zeros_like(scores) if tie_break is None else tie_break
    scores, base = (x.where(~x.isnan(), -torch.inf) for x in (scores, base))
    ranked = scores.masked_fill(protected, torch.inf)
    columns = (-ranked).tolist(), (-base).tolist(), positions.tolist(), range(len(scores))
    return [slot for *_, position, slot in sorted(zip(*columns, strict=True)) if position >= 0]


def select_ref(
    scores: Tensor, tie_break: Tensor | None, positions: Tensor, protected: Tensor, keep: Tensor | int
) -> Tensor:
    """The first `keep` of every head, bool [B,H,T]. Arguments as in `select_triton`."""
    kept = torch.zeros(positions.shape, dtype=torch.bool, device=positions.device)
    counts = torch.as_tensor(keep).expand(positions.shape[:2])
    for b, h in torch.cartesian_prod(*map(torch.arange, positions.shape[:2])).tolist():
        base = None if tie_break is None else tie_break[b, h]
        order = best_first_ref(scores[b, h], base, positions[b, h], protected[b, h])
        kept[b, h, order[: max(0, int(counts[b, h]))]] = True
    return kept


def victim_ref(scores: Tensor, tie_break: Tensor | None, positions: Tensor, protected: Tensor) -> Tensor:
    """The last of every head that is not protected, [B,H,1]; slot 0 where there is none."""
    victims = torch.zeros(*positions.shape[:2], 1, dtype=torch.int64, device=positions.device)
    for b, h in torch.cartesian_prod(*map(torch.arange, positions.shape[:2])).tolist():
        base = None if tie_break is None else tie_break[b, h]
        order = best_first_ref(scores[b, h], base, positions[b, h].masked_fill(protected[b, h], -1), protected[b, h])
        victims[b, h] = order[-1] if order else 0
    return victims


@jit
def _number(x: tl.tensor) -> tl.tensor:
    return tl.where(x == x, x, float("-inf"))


@jit
def _ordered(x: tl.tensor) -> tl.tensor:
    """uint32 keys in the order of float32 numbers; 0 and -0 are equal."""
    bits = tl.where(x == 0, 0.0, _number(x)).to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


class Ranked(NamedTuple):
    """What slots are ranked by, [B,H,T] of all heads or [T] of one; base None: nothing decides between equal scores."""

    scores: View
    base: View | None
    positions: View
    protected: View


@jit
def _score_keys(x: Ranked, slots: tl.tensor, T: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Keys of slots by score, the protected ones first, and which of them hold a token."""
    stored = tl.load(x.positions.ptr + slots, mask=slots < T, other=-1) >= 0
    scores = tl.load(x.scores.ptr + slots, mask=stored, other=0.0)
    stays = tl.load(x.protected.ptr + slots, mask=stored, other=0) != 0
    return _ordered(tl.where(stays, float("inf"), scores)), stored


@jit
def _base_keys(base: View, slots: tl.tensor, mask: tl.tensor) -> tl.tensor:
    return _ordered(tl.load(base.ptr + slots, mask=mask, other=0.0))


@jit
def _age_keys(x: Ranked, slots: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """The lower position first."""
    return tl.load(x.positions.ptr + slots, mask=mask, other=0).to(tl.uint32) ^ 0xFFFFFFFF


@jit
def _cut(
    x: Ranked,
    T: tl.tensor,
    need: tl.tensor,
    end: tl.tensor,
    score_cut: tl.tensor,
    base_end: tl.tensor,
    base_cut: tl.tensor,
    STAGE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The key of the last of `need` slots, how many of those equal to it are needed, and how many there are.

    STAGE: by score (0), by base score at the cut of the scores (1), by age at the cut of both (2).
    """
    bins = tl.arange(0, 256)
    prefix = tl.full([], 0, tl.uint32)
    equal = need
    for byte in range(4):  # not unrolled: the histogram is long
        counts = tl.zeros([256], tl.int32)
        for start in range(0, end, BLOCK):
            slots = start + tl.arange(0, BLOCK)
            keys, among = _score_keys(x, slots, T)
            if STAGE > 0:
                among = among & (keys == score_cut)
                if x.base is not None:
                    keys = _base_keys(x.base, slots, among & (slots < base_end))
            if STAGE == 2:
                among = among & ((keys == base_cut) | (slots >= base_end))
                keys = _age_keys(x, slots, among)
            lead = keys >> (24 - 8 * byte)
            among = among & ((lead >> 8) == prefix)
            counts += tl.histogram((lead & 255).to(tl.int32), 256, mask=among)
        reach = tl.cumsum(counts, 0, reverse=True)  # how many have this byte or a larger one
        need = tl.maximum(tl.minimum(need, tl.sum(counts, 0)), 0)  # a head may hold fewer
        place = tl.maximum(tl.sum((reach >= need).to(tl.int32), 0) - 1, 0)
        equal = tl.sum(tl.where(bins == place, counts, 0), 0)
        need -= tl.sum(tl.where(bins == place, reach - counts, 0), 0)
        prefix = (prefix << 8) | place.to(tl.uint32)
    return prefix, need, equal


@jit
def _above(
    x: Ranked,
    score_keys: tl.tensor,
    stored: tl.tensor,
    slots: tl.tensor,
    score_cut: tl.tensor,
    base_cut: tl.tensor,
    age_cut: tl.tensor,
    base_end: tl.tensor,
    age_end: tl.tensor,
    ASCENDING: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Which slots come before the cuts, by score, base score and age in turn, and which are equal to all of them."""
    stays = stored & (score_keys > score_cut)
    at_cut = stored & (score_keys == score_cut)
    if x.base is not None:
        keys = _base_keys(x.base, slots, at_cut & (slots < base_end))
        stays = stays | (at_cut & (slots < base_end) & (keys > base_cut))
        at_cut = at_cut & ((slots >= base_end) | (keys == base_cut))
    if not ASCENDING:
        keys = _age_keys(x, slots, at_cut & (slots < age_end))
        stays = stays | (at_cut & (slots < age_end) & (keys > age_cut))
        at_cut = at_cut & ((slots >= age_end) | (keys == age_cut))
    return stays, at_cut


@jit
def _select(
    ranked: Ranked,
    counts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    H: tl.tensor,
    T: tl.tensor,
    keep: tl.tensor,
    ASCENDING: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: which slots of one KV head stay: `keep`, or every head its own number, at counts_ptr."""
    row = tl.program_id(0).to(tl.int64)
    scores, positions = of_head(ranked.scores, row, H, 0), of_head(ranked.positions, row, H, 0)
    x = Ranked(scores, of_head(ranked.base, row, H, 0), positions, of_head(ranked.protected, row, H, 0))
    need = keep + tl.full([], 0, tl.int32)
    if counts_ptr is not None:
        need = tl.load(counts_ptr + row).to(tl.int32)
    base_cut = tl.full([], 0, tl.uint32)
    age_cut = tl.full([], 0, tl.uint32)
    base_end, age_end = 0, 0  # slots to look through for a later cut: none where all equal at the one before stay
    score_cut, need, equal = _cut(x, T, need, T, base_cut, base_end, base_cut, 0, BLOCK)
    if x.base is not None:
        base_end = tl.where(need < equal, T, 0)
        base_cut, left, tied = _cut(x, T, need, base_end, score_cut, base_end, base_cut, 1, BLOCK)
        need = tl.where(base_end > 0, left, need)
        equal = tl.where(base_end > 0, tied, equal)
    if not ASCENDING:
        age_end = tl.where(need < equal, T, 0)
        age_cut, left, tied = _cut(x, T, need, age_end, score_cut, base_end, base_cut, 2, BLOCK)
        need = tl.where(age_end > 0, left, need)
    before = 0
    for start in range(0, T, BLOCK):
        slots = start + tl.arange(0, BLOCK)
        keys, stored = _score_keys(x, slots, T)
        stays, at_cut = _above(x, keys, stored, slots, score_cut, base_cut, age_cut, base_end, age_end, ASCENDING)
        ties = at_cut.to(tl.int32)
        rank = before + tl.cumsum(ties, 0) - ties
        before += tl.sum(ties, 0)
        tl.store(out_ptr + row * T + slots, stays | (at_cut & (rank < need)), mask=slots < T)


@jit
def _victim(ranked: Ranked, out_ptr: tl.tensor, H: tl.tensor, T: tl.tensor, BLOCK: tl.constexpr) -> None:
    """One program: the slot to give up of one KV head; every lane keeps the worst of its slots, then they compare."""
    row = tl.program_id(0).to(tl.int64)
    scores, positions = of_head(ranked.scores, row, H, 0), of_head(ranked.positions, row, H, 0)
    x = Ranked(scores, of_head(ranked.base, row, H, 0), positions, of_head(ranked.protected, row, H, 0))
    worst = tl.full([BLOCK], float("inf"), tl.float32)
    worst_base = tl.zeros([BLOCK], tl.float32)
    newest = tl.full([BLOCK], -1, tl.int32)
    found = tl.full([BLOCK], 0, tl.int32)
    for start in range(0, T, BLOCK):
        slots = start + tl.arange(0, BLOCK)
        places = tl.load(x.positions.ptr + slots, mask=slots < T, other=-1).to(tl.int32)
        may_go = (places >= 0) & (tl.load(x.protected.ptr + slots, mask=slots < T, other=1) == 0)
        own = _number(tl.load(x.scores.ptr + slots, mask=may_go, other=0.0))
        equal = places > newest
        own_base = worst_base
        if x.base is not None:
            own_base = _number(tl.load(x.base.ptr + slots, mask=may_go, other=0.0))
            equal = (own_base < worst_base) | ((own_base == worst_base) & equal)
        worse = may_go & ((newest < 0) | (own < worst) | ((own == worst) & equal))
        worst = tl.where(worse, own, worst)
        worst_base = tl.where(worse, own_base, worst_base)
        newest = tl.where(worse, places, newest)
        found = tl.where(worse, slots, found)
    goes = newest >= 0
    goes = goes & (worst == tl.min(tl.where(goes, worst, float("inf")), 0))
    if x.base is not None:
        goes = goes & (worst_base == tl.min(tl.where(goes, worst_base, float("inf")), 0))
    newest = tl.where(goes, newest, -1)
    goes = goes & (newest == tl.max(newest, 0))
    slot = tl.min(tl.where(goes, found, 2147483647), 0)
    tl.store(out_ptr + row, tl.where(slot == 2147483647, 0, slot).to(tl.int64))


def tiles(slots: int, capability: int) -> dict[str, int]:
    """Block of slots and warps for rows of `slots` on sm_<capability>: a row of up to 4,096 slots at once.

    8 slots a thread (16 spill); before Hopper blocks of 1,024 (Triton 3.6 spills 8 bytes a thread there with 2,048).
    """
    block = min(1024 if capability < 90 else 4096, max(128, next_power_of_two(slots)))
    return {"BLOCK": block, "num_warps": max(1, block // 256)}


@lru_cache(maxsize=64)
def _capability(device: torch.device) -> int:
    """80, 90 or the like; what the interpreter is given is any."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    return 10 * major + minor


def _check(kernel: str, scores: Tensor, tie_break: Tensor | None) -> None:
    require_triton(kernel, scores.device)
    for what, x in (("scores", scores), ("tie_break", tie_break)):
        if x is not None and x.dtype != torch.float32:
            raise ValueError(f"{kernel}_triton compares numbers in float32, so {what} must be float32, got {x.dtype}")


def select_triton(
    scores: Tensor,
    tie_break: Tensor | None,
    positions: Tensor,
    protected: Tensor,
    keep: Tensor | int,
    ascending: bool = False,
) -> Tensor:
    """The slots that stay, bool [B,H,T], min(keep, tokens stored) of them per KV head: one launch.

    scores, tie_break (optional) [B,H,T] float32; positions [B,H,T] (-1 = empty); protected [B,H,T] bool; keep: an int
    or counts [B,H]. ascending: stored tokens are known to lie in order of position. Any strides, CUDA tensors; CPU
    tensors under TRITON_INTERPRET=1. ValueError for other dtypes and where Triton is missing.
    """
    _check("select", scores, tie_break)
    batch, heads, slots = positions.shape
    kept = torch.empty(batch, heads, slots, dtype=torch.bool, device=positions.device)
    if not kept.numel():
        return kept
    counts = keep.expand(batch, heads).contiguous() if isinstance(keep, Tensor) else None
    number = 0 if isinstance(keep, Tensor) else max(-1, min(keep, slots))
    how = {"ASCENDING": ascending, **tiles(slots, _capability(scores.device))}
    ranked = Ranked(rows(scores), None if tie_break is None else rows(tie_break), rows(positions), rows(protected))
    with torch.cuda.device_of(scores):
        _select[batch * heads,](ranked, counts, kept, heads, slots, number, **how)
    return kept


def victim_triton(scores: Tensor, tie_break: Tensor | None, positions: Tensor, protected: Tensor) -> Tensor:
    """The one slot [B,H,1] to give up: neither protected nor empty, the last in the order of preference. One launch.

    Arguments as in `select_triton`; slot 0 where nothing may go.
    """
    _check("victim", scores, tie_break)
    batch, heads, slots = positions.shape
    victims = torch.empty(batch, heads, 1, dtype=torch.int64, device=positions.device)
    if not victims.numel():
        return victims
    ranked = Ranked(rows(scores), None if tie_break is None else rows(tie_break), rows(positions), rows(protected))
    with torch.cuda.device_of(scores):
        _victim[batch * heads,](ranked, victims, heads, slots, **tiles(slots, _capability(scores.device)))
    return victims
