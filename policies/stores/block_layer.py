"""Layers of blocks of codes (`kvbench.policies.stores.code_blocks`)."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from kvbench.policies.observation import AttentionParams, State
from kvbench.policies.stores.code_attention import attend_to_codes
from kvbench.policies.stores.code_blocks import Blocks, Codes, Tail
from kvbench.policies.stores.coded_layer import CodedLayer
from kvbench.policies.stores.slot_store import SIDES


class BlockLayer(CodedLayer):
    """A layer whose codec makes blocks of its tokens with `recode`."""

    blocks: Blocks

    def _take_over(self, tokens: State, evicted: bool) -> None:
        tail = Tail.of({name: tokens[name] for name in (*SIDES, "positions")}, (), ascending=True, packed=True)
        if not evicted:
            del tail.memory["positions"]
        if self._expected is not None:
            tail.expect(self._expected)
        self.blocks = Blocks(self._decode, tail, self.notes)
        self.blocks.prompt = self.prompt

    def _decode(self, codes: Codes, side: int, tokens: int) -> Tensor:
        x = self.codec.decode(codes, side, tokens, self._like[side].shape[-1])
        return x if x.dim() == 5 else x[:, :, None]

    def _flush(self, first: bool) -> None:
        self.codec.recode(self.blocks, first)
        self.blocks.before = self.blocks.tokens
        if first:
            self.blocks.drop(0)  # no view of the prompt

    def _extend(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        self.blocks.tail.append(keys, values, positions)

    def expect(self, tokens: int) -> None:
        super().expect(tokens)
        if self.coded and not self.apart:
            self.blocks.tail.expect(tokens)

    def _dequantised(self, side: int) -> Tensor:
        return self.blocks.view(side).to(self.like.dtype)

    def _places(self) -> Tensor:
        return self.blocks.positions

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, x in self.blocks.named():
            yield "positions" if name == "positions" else self.kind(name), x
        for name, x in self.blocks.tail.memory.items():
            yield "positions" if name == "positions" else "full precision", x

    def _spare_nbytes(self) -> int:
        return self.blocks.tail._spare_nbytes() if self.coded else super()._spare_nbytes()

    def _attend(self, queries: Tensor, positions: Tensor, how: AttentionParams) -> Tensor | None:
        if not self.blocks.coded:
            return None  # all in full precision
        call = queries, positions, how, self.blocks.scores, self.blocks.weighted, self.blocks.positions
        out, weights = attend_to_codes(*call)
        self.codec.attended(self.blocks, weights, positions)
        return out.to(queries.dtype)
