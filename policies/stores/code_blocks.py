"""The layer of codes that later codes do not extend (GEAR, ZipCache, ThinK, KC-VC without groups).

Each block has codes of any shapes, as named tensors. They change between steps, so that no CUDA graph records a step,
and no table has these layers.
"""

from collections.abc import Iterator, Mapping
from functools import partial

from torch import Tensor

from kvbench.policies.stores.coded_layer import CodedLayer, CodeRun


class BlockLayer(CodedLayer):
    """blocks: of keys and of values, oldest first: the number of tokens, and their codes by name."""

    blocks: tuple[list[tuple[int, Mapping[str, Tensor]]], ...]

    def _begin(self) -> None:
        super()._begin()
        self.blocks = [], []

    def hold(self, side: int, tokens: int, codes: Mapping[str, Tensor], again: bool = False) -> None:
        held, all_tokens = self.blocks[side], tokens
        if again:
            all_tokens += self.in_codes[side]
            held.clear()
        held.append((all_tokens, codes))
        self._became_codes(side, tokens)

    def codes_of(self, side: int) -> Mapping[str, Tensor]:
        return self.blocks[side][-1][1] if self.blocks[side] else {}

    def _runs(self, side: int) -> Iterator[CodeRun]:
        return (
            CodeRun(tokens, tokens, partial(self._decode, codes, side, tokens)) for tokens, codes in self.blocks[side]
        )

    def _decode(self, codes: Mapping[str, Tensor], side: int, tokens: int, some: slice) -> Tensor:
        x = self.codec.decode(codes, side, tokens, self._like[side].shape[-1])
        return x if x.dim() == 5 else x[:, :, None]

    def _codes(self) -> Iterator[tuple[str, Tensor, int]]:
        for codes in (codes for blocks in self.blocks for _, codes in blocks):
            yield from ((name, x, -1) for name, x in codes.items())
