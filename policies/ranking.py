"""The ranking of a layer's stored tokens, and which are kept.

Shapes: B batch, H_kv KV heads, T slots.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvbench.policies.constants import at_hand, on_device
from kvbench.policies.select import select, victim


def protected(positions: Tensor, seen: Tensor, first: Sequence[int], newest: Sequence[int]) -> Tensor:
    """Stored tokens that are always kept, bool [B,H_kv,T]: the first and the newest positions, counts per sequence.

    positions [B,H_kv,T] (-1 = empty slot); seen [B]: tokens seen of each sequence.
    """
    occupied = positions >= 0
    stays = occupied & False
    if any(first):
        stays |= positions < on_device(tuple(first), seen.device)[:, None, None]
    if any(newest):
        stays |= positions >= (seen - on_device(tuple(newest), seen.device))[:, None, None]
    return stays & occupied


def half_the_bits(x: Tensor) -> Tensor:
    """Numbers rounded to half the bits of their significand (Veltkamp's splitting)."""
    bits = round(-math.log2(torch.finfo(x.dtype).eps)) // 2 + 1
    large = x * (2.0**bits + 1)
    return large - (large - x)


@dataclass(frozen=True)
class Ranking:
    """Scores of a layer's slots, [B,H_kv,T], higher = keep; `tie_break` decides between equal scores.

    protected, bool [B,H_kv,T]: tokens that are always kept; seen [B]: tokens seen of each sequence. spared: protected
    tokens that a scorer spares, whatever their position. packed: no slot is empty. ascending: stored tokens are in
    order of position.
    """

    scores: Tensor
    tie_break: Tensor | None
    positions: Tensor
    protected: Tensor
    seen: Tensor
    spared: Tensor | None = None
    packed: bool = False
    ascending: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of its own tensors while a layer waits for its budget (positions are the store's)."""
        tie_break = 0 if self.tie_break is None else self.tie_break.nbytes
        spared = 0 if self.spared is None else self.spared.nbytes
        return self.scores.nbytes + tie_break + self.protected.nbytes + spared

    @property
    def occupied(self) -> Tensor:
        return self.positions >= 0

    def broken(self, wait: bool = True) -> list[int]:
        """The sequences in which an unprotected token has the score NaN.

        wait=False: not checked on a GPU, whose host would have to wait for the answer; there such a token is evicted
        first.
        """
        if not (wait or at_hand(self.scores)) or not bool(self.scores.sum().isnan()):  # a tenth of asking each
            return []
        wrong = self.scores.isnan() & self.occupied & ~self.protected
        return wrong.flatten(1).any(-1).nonzero().flatten().tolist()

    def select(self, keep: Tensor | int) -> Tensor:
        """The kept slots, bool [B,H_kv,T]; keep: an int or counts [B,H_kv]."""
        keys = self.scores, self.tie_break, self.positions, self.protected
        return select(*keys, keep, self.ascending, self.packed)

    def victim(self) -> Tensor:
        """The slot to evict in every KV head, [B,H_kv,1]."""
        return victim(self.scores, self.tie_break, self.positions, self.protected, self.packed)

    def protecting(self, first: Sequence[int], newest: Sequence[int]) -> "Ranking":
        """This ranking with other protected counts per sequence."""
        stays = protected(self.positions, self.seen, first, newest)
        return replace(self, protected=stays if self.spared is None else stays | self.spared)

    def at(self, slots: Tensor, positions: Tensor, packed: bool) -> "Ranking":
        """The ranking of the slots [B,H_kv,n] that were kept, in order, now at positions [B,H_kv,n]."""
        return Ranking(
            self.scores.gather(-1, slots),
            None if self.tie_break is None else self.tie_break.gather(-1, slots),
            positions,
            self.protected.gather(-1, slots),
            self.seen,
            None if self.spared is None else self.spared.gather(-1, slots),
            packed,
            ascending=True,
        )
