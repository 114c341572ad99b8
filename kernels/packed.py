"""Quantised tokens as the kernels read them.

Shapes: B batch, H KV heads, N tokens in codes, R tokens of a tail, U numbers of a group, W int32 words of a group,
D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packed:
    """Quantised tokens: x = code * scale + minimum; code j of an int32 word lies at its bits [b*j, b*j + b - 1].

    Per channel: groups of `unit` tokens, words [B,H,N/U,D,W], scale and minimum [B,H,N/U,D]. Per token (`per_token`):
    groups of `unit` channels, words [B,H,N,D/U,W], scale and minimum [B,H,N,D/U]. counts [B,H]: the tokens of each
    head, where they differ.
    """

    words: Tensor
    scale: Tensor
    minimum: Tensor
    bits: int
    unit: int
    per_token: bool
    counts: Tensor | None = None

    @property
    def tokens(self) -> int:
        """The most any KV head holds."""
        return self.words.shape[2] * (1 if self.per_token else self.unit)

    def dequantised(self) -> Tensor:
        """[B,H,N,D] float32."""
        shifts = torch.arange(0, 32, self.bits, device=self.words.device)
        codes: Tensor = (self.words[..., None] >> shifts & 2**self.bits - 1).flatten(-2)[..., : self.unit]
        x = codes * self.scale.float()[..., None] + self.minimum.float()[..., None]
        return x.flatten(3) if self.per_token else x.transpose(-1, -2).flatten(2, 3)


@dataclass(frozen=True)
class Side:
    """Keys or values of a layer: codes, then a tail [B,H,R,D] in full precision, counts [B,H] where heads differ."""

    packed: Packed
    tail: Tensor
    counts: Tensor | None = None

    @property
    def even(self) -> bool:
        """Whether all KV heads hold equally many tokens, equally many of them as codes."""
        return self.counts is None and self.packed.counts is None

    def coded(self) -> Tensor:
        """[B,H] tokens of each head in codes."""
        return self._full(self.packed.tokens) if self.packed.counts is None else self.packed.counts

    def lengths(self) -> Tensor:
        """[B,H] tokens of each head."""
        return self.coded() + (self._full(self.tail.shape[2]) if self.counts is None else self.counts)

    def _full(self, count: int) -> Tensor:
        return torch.full(self.tail.shape[:2], count, device=self.tail.device)
