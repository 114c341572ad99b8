# ruff: noqa: N803 - in kernels, sizes have the names they have in shapes
"""One list of work for KV heads of any lengths: tiles of slots, head after head, in equal shares for all programs.

Program p of P takes tiles p W / P to (p + 1) W / P of all W tiles, so that a long head is shared by many programs and a
short one has part of one (as FlashInfer plans, Ye et al. 2025). Lengths are read on the device: nothing waits for them,
and a CUDA graph follows them. What program p makes of KV head r lies at place p + r, which no other pair has.

Shapes: R KV heads of all sequences, T slots.
"""

from __future__ import annotations

from typing import NamedTuple

from kvbench.kernels.jit import jit, tl


class Work(NamedTuple):
    """R KV heads of T slots each, or of counts [R] of them."""

    R: tl.tensor
    T: tl.tensor
    counts: tl.tensor


@jit
def segment(starts: tl.tensor, counts: tl.tensor, row: tl.tensor, T: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Where the slots of a KV head start, and how many they are: T from 0 on, without counts."""
    start, length = tl.zeros([], tl.int64), T
    if counts is not None:
        start = tl.load(starts + row).to(tl.int64)
        length = tl.load(counts + row).to(tl.int32)
    return start, length


@jit
def tiles_of(work: Work, rows: tl.tensor, BLOCK_T: tl.constexpr) -> tl.tensor:
    """Tiles of KV heads `rows`, 0 beyond the last one."""
    length = tl.where(rows < work.R, work.T, 0)
    if work.counts is not None:
        length = tl.load(work.counts + rows, mask=rows < work.R, other=0).to(tl.int32)
    return tl.cdiv(length, BLOCK_T)


@jit
def tiles_before(work: Work, row: tl.tensor, BLOCK_T: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Tiles of all KV heads before `row`, and of all."""
    before = row.to(tl.int64) * tl.cdiv(work.T, BLOCK_T)
    total = work.R.to(tl.int64) * tl.cdiv(work.T, BLOCK_T)
    if work.counts is not None:
        before -= before
        total -= total
        for start in range(0, work.R, 1024):
            rows = start + tl.arange(0, 1024)
            tiles = tiles_of(work, rows, BLOCK_T)
            before += tl.sum(tl.where(rows < row, tiles, 0).to(tl.int64), 0)
            total += tl.sum(tiles.to(tl.int64), 0)
    return before, total


@jit
def row_of(work: Work, tile: tl.tensor, BLOCK_T: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The KV head that has a tile, and the first of its tiles."""
    row = tile // tl.maximum(tl.cdiv(work.T, BLOCK_T), 1)
    first = row * tl.cdiv(work.T, BLOCK_T)
    if work.counts is not None:
        row -= row
        first -= first
        before = tile - tile
        for start in range(0, work.R, 1024):
            rows = start + tl.arange(0, 1024)
            ends = before + tl.cumsum(tiles_of(work, rows, BLOCK_T).to(tl.int64), 0)
            over = (ends <= tile) & (rows < work.R)
            row += tl.sum(over.to(tl.int64), 0)
            first = tl.maximum(first, tl.max(tl.where(over, ends, 0), 0))
            before = tl.max(ends, 0)
    return row, first


@jit
def share_of(
    work: Work, program: tl.tensor, programs: tl.tensor, BLOCK_T: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """A program's tiles, `begin` to `end`; its KV heads, `first` up to `last`; the first of the first one's tiles."""
    _, total = tiles_before(work, program, BLOCK_T)
    working = tl.maximum(tl.minimum(programs, total), 1)
    begin = tl.minimum(program * total // working, total)
    end = tl.minimum((program + 1) * total // working, total)
    first, before = row_of(work, begin, BLOCK_T)
    last, _ = row_of(work, tl.maximum(end - 1, 0), BLOCK_T)
    return begin, end, first, tl.where(begin < end, last + 1, first), before


@jit
def parts_of(work: Work, row: tl.tensor, programs: tl.tensor, BLOCK_T: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Where the first part of a KV head lies, and how many there are: none of a head without slots."""
    before, total = tiles_before(work, row, BLOCK_T)
    tiles = tiles_of(work, row, BLOCK_T)
    working = tl.minimum(total, programs)
    total = tl.maximum(total, 1)
    first = ((before + 1) * working - 1) // total  # the last program that begins there or before
    last = ((before + tiles) * working - 1) // total
    return first + row, tl.where(tiles > 0, last - first + 1, 0).to(tl.int32)
