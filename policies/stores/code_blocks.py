"""The layer of codes that later codes do not extend (GEAR, ZipCache, ThinK, KC-VC without groups): blocks, exact tail.

A block has codes of any shapes, as named tensors. Its shapes change from one step to another, so that no CUDA graph
records a step, and no table has these layers.

Shapes: H KV heads, r query rows per KV head, C tokens, n tokens of a block, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.references import widen
from kvbench.policies.observation import Memory
from kvbench.policies.stores.code_attention import scores_by_block, weighted_by_block
from kvbench.policies.stores.slot_store import SIDES, SlotStore

TAIL_GROWTH = 16  # slots; most tails have at most a few hundred tokens, so moving them this often costs nothing

Codes = Mapping[str, Tensor]


class Tail(SlotStore):
    """The exact tokens, in order; with positions if a token was evicted."""

    def _growth(self) -> int:
        return TAIL_GROWTH if self._expected is None else min(TAIL_GROWTH, max(self._expected, 1))


class Block(NamedTuple):
    """Codes of the keys and of the values of consecutive tokens, by name; positions [1,H,n] int32, if stored."""

    tokens: int
    sides: tuple[Codes, Codes]
    positions: Tensor | None


class Blocks:
    """Blocks of codes, oldest first, then exact tokens.

    decode: the tokens [1,H,m,n/m,D], in m groups or in one, of codes of a side and of their number n. notes: data of
    the codec, [1,H,...] by name. before: tokens at the end of the last step. prompt: its length, if it was observed.
    """

    before = prompt = 0

    def __init__(self, decode: Callable[[Codes, int, int], Tensor], tail: Tail, notes: Memory) -> None:
        self.blocks: list[Block] = []
        self.tail, self.notes, self._decode = tail, notes, decode

    @property
    def coded(self) -> int:
        """The number of tokens that are codes."""
        return sum(block.tokens for block in self.blocks)

    @property
    def exact(self) -> int:
        """The number of exact tokens."""
        return self.tail.used

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return self.coded + self.exact

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model."""
        return self.tail.like.dtype

    @property
    def positions(self) -> Tensor:
        """[1,H,C] int32."""
        if "positions" in self.tail.memory:
            held = [block.positions for block in self.blocks if block.positions is not None]
            return torch.cat([*held, self.tail.positions], dim=2)
        like = self.tail.like
        return torch.arange(self.tokens, dtype=torch.int32, device=like.device).expand(*like.shape[:2], -1)

    def oldest(self, side: int, count: int) -> Tensor:
        """The first `count` exact tokens of a side, [1,H,count,D]."""
        return self.tail.memory[SIDES[side]][:, :, :count]

    def view(self, side: int) -> Tensor:
        """[1,H,C,D] in float32 (or float64), dequantised if it was quantised."""
        tail = widen(self.oldest(side, self.exact))
        held = [self._decode(block.sides[side], side, block.tokens) for block in self.blocks]
        return torch.cat([*(x.flatten(2, 3).to(tail.dtype) for x in held), tail], dim=2)

    def hold(self, count: int, sides: Iterable[Codes], again: bool = False) -> None:
        """Hold the oldest `count` exact tokens as codes of keys and of values; again: also of all earlier tokens."""
        keys, values = sides
        positions, tokens = None, count
        if "positions" in self.tail.memory:
            positions = self.positions[:, :, (0 if again else self.coded) : self.coded + count].clone()
        if again:
            tokens, self.blocks = self.coded + count, []
        self.blocks.append(Block(tokens, (keys, values), positions))
        self.drop(count)

    def drop(self, count: int) -> None:
        """Free the oldest exact tokens, and views of larger tensors."""
        tail, form = self.tail, torch.contiguous_format
        tail.memory = {name: x[:, :, count : tail.used].clone(memory_format=form) for name, x in tail.memory.items()}
        tail.use(tail.used - count, 0)
        tail.lent = False

    # --- attention --------------------------------------------------------------------------------------------------
    def scores(self, rows: Tensor) -> Tensor:
        """Products [1,H,r,C] of query rows [1,H,r,D] with the keys."""
        found = [scores_by_block(rows, block.tokens, self._whole(block, 0), block.tokens) for block in self.blocks]
        return torch.cat([*found, rows @ self.oldest(0, self.exact).to(rows.dtype).mT], dim=-1)

    def weighted(self, weights: Tensor) -> Tensor:
        """Sums [1,H,r,D] of the values with weights [1,H,r,C]."""
        *coded, exact = weights.split([*(block.tokens for block in self.blocks), self.exact], dim=-1)
        sums: Tensor = exact @ self.oldest(1, self.exact).to(weights.dtype)
        for block, own in zip(self.blocks, coded, strict=True):
            sums += weighted_by_block(own, self._whole(block, 1), block.tokens)
        return sums

    def _whole(self, block: Block, side: int) -> Callable[[slice], Tensor]:
        return lambda some: self._decode(block.sides[side], side, block.tokens)

    # --- bytes ------------------------------------------------------------------------------------------------------
    def named(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors but those of the tail, by name."""
        for block in self.blocks:
            yield from (item for side in block.sides for item in side.items())
            if block.positions is not None:
                yield "positions", block.positions
        yield from self.notes.items()
