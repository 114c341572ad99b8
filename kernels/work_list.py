# ruff: noqa: N803 - in kernels, sizes have the names they have in shapes
"""One list of work for KV heads of any lengths: tiles of slots, head after head, in equal shares for all programs.

Program p of P takes tiles p W / P to (p + 1) W / P of all W tiles, so that a long head is shared by many programs and a
short one has part of one (as FlashInfer plans, Ye et al. 2025). Lengths are read on the device: nothing waits for them,
and a CUDA graph follows them. What program p makes of KV head r lies at place p + r, which no other pair has.

Shapes: R KV heads of all sequences, T slots.
"""

from __future__ import annotations

from kvbench.kernels.jit import jit, tl

CHUNK = 1024  # lengths looked through at once


@jit
def tiles_of(counts_ptr: tl.tensor, rows: tl.tensor, R: tl.tensor, T: tl.tensor, BLOCK_T: tl.constexpr) -> tl.tensor:
    """Tiles of KV heads `rows`, 0 beyond the last one: of their own lengths, or without counts of T slots each."""
    length = tl.where(rows < R, T, 0)
    if counts_ptr is not None:
        length = tl.load(counts_ptr + rows, mask=rows < R, other=0).to(tl.int32)
    return tl.cdiv(length, BLOCK_T)


@jit
def tiles_before(
    counts_ptr: tl.tensor,
    row: tl.tensor,
    R: tl.tensor,
    T: tl.tensor,
    BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Tiles of all KV heads before `row`, and of all."""
    before = row.to(tl.int64) * tl.cdiv(T, BLOCK_T)
    total = R.to(tl.int64) * tl.cdiv(T, BLOCK_T)
    if counts_ptr is not None:
        before -= before
        total -= total
        for start in range(0, R, CHUNK):
            rows = start + tl.arange(0, CHUNK)
            tiles = tiles_of(counts_ptr, rows, R, T, BLOCK_T)
            before += tl.sum(tl.where(rows < row, tiles, 0).to(tl.int64), 0)
            total += tl.sum(tiles.to(tl.int64), 0)
    return before, total


@jit
def row_of(
    counts_ptr: tl.tensor,
    tile: tl.tensor,
    R: tl.tensor,
    T: tl.tensor,
    BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The KV head that has a tile, and the first of its tiles."""
    row = tile // tl.maximum(tl.cdiv(T, BLOCK_T), 1)
    first = row * tl.cdiv(T, BLOCK_T)
    if counts_ptr is not None:
        row -= row
        first -= first
        before = tile - tile
        for start in range(0, R, CHUNK):
            rows = start + tl.arange(0, CHUNK)
            ends = before + tl.cumsum(tiles_of(counts_ptr, rows, R, T, BLOCK_T).to(tl.int64), 0)
            over = (ends <= tile) & (rows < R)
            row += tl.sum(over.to(tl.int64), 0)
            first = tl.maximum(first, tl.max(tl.where(over, ends, 0), 0))
            before = tl.max(ends, 0)
    return row, first


@jit
def share_of(
    counts_ptr: tl.tensor,
    program: tl.tensor,
    programs: tl.tensor,
    R: tl.tensor,
    T: tl.tensor,
    BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """A program's tiles, `begin` to `end`; its KV heads, `first` up to `last`; the first of the first one's tiles."""
    _, total = tiles_before(counts_ptr, program, R, T, BLOCK_T, CHUNK)
    working = tl.maximum(tl.minimum(programs, total), 1)
    begin = tl.minimum(program * total // working, total)
    end = tl.minimum((program + 1) * total // working, total)
    first, before = row_of(counts_ptr, begin, R, T, BLOCK_T, CHUNK)
    last, _ = row_of(counts_ptr, tl.maximum(end - 1, 0), R, T, BLOCK_T, CHUNK)
    return begin, end, first, tl.where(begin < end, last + 1, first), before


@jit
def parts_of(
    counts_ptr: tl.tensor,
    row: tl.tensor,
    R: tl.tensor,
    T: tl.tensor,
    programs: tl.tensor,
    BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Where the first part of a KV head lies, and how many there are: none of a head without slots."""
    before, total = tiles_before(counts_ptr, row, R, T, BLOCK_T, CHUNK)
    tiles = tiles_of(counts_ptr, row, R, T, BLOCK_T)
    working = tl.minimum(total, programs)
    total = tl.maximum(total, 1)
    first = ((before + 1) * working - 1) // total  # the last program that begins there or before
    last = ((before + tiles) * working - 1) // total
    return first + row, tl.where(tiles > 0, last - first + 1, 0).to(tl.int32)
