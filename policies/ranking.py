"""The ranking of a layer's stored tokens, and the slots to keep, given scores, with one rule for ties.

Order of preference: protected tokens, then the higher score, then the higher base score (`tie_break`), then the lower
position. NaN counts as -inf here; it is an error of the sequence (`Ranking.broken`).
Shapes: B batch, H_kv = H KV heads, T slots.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvbench.kernels.selection import comparable, preference, select
from kvbench.policies.constants import on_device
from kvbench.policies.stores.slots import rows_of


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
    order of position. ordered: slots are in order of preference. unrounded: scores before they were rounded
    (`Needs.ties`), for a threshold.
    """

    scores: Tensor
    tie_break: Tensor | None
    positions: Tensor
    protected: Tensor
    seen: Tensor
    spared: Tensor | None = None
    packed: bool = False
    ascending: bool = False
    ordered: bool = False
    unrounded: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, without positions, which belong to the store."""
        optional = [x.nbytes for x in (self.tie_break, self.spared, self.unrounded) if x is not None]
        return self.scores.nbytes + self.protected.nbytes + sum(optional)

    @property
    def occupied(self) -> Tensor:
        return self.positions >= 0

    @cached_property
    def broken(self) -> Tensor:
        """The sequences in which an unprotected token has the score NaN, bool [B]."""
        counted = ~self.protected if self.packed else ~self.protected & self.occupied
        return (self.scores.isnan() & counted).flatten(1).any(-1)

    def select(self, keep: Tensor | int) -> Tensor:
        """The kept slots, bool [B,H_kv,T]; keep: an int or counts [B,H_kv]."""
        keys = self.scores, self.tie_break, self.positions, self.protected
        return select(*keys, keep, self.ascending, self.packed)

    @cached_property
    def order(self) -> Tensor:
        """The slots [B,H_kv,T] in order of preference."""
        keys = self.scores, self.tie_break, self.positions, self.protected
        return preference(*keys, self.ascending and self.packed)

    def slots(self, keep: int) -> Tensor:
        """The kept slots [B,H_kv,keep] in order of position, of tokens in that order without an empty slot."""
        assert self.ascending
        assert self.packed
        return self.order[..., :keep].sort(-1).values

    def victim(self) -> Tensor:
        """The slot to evict in every KV head, [B,H_kv,1], as `select` but by a few passes instead of sorts."""
        stays = self.protected if self.packed else self.protected | ~self.occupied
        for key in (self.scores,) if self.tie_break is None else (self.scores, self.tie_break):
            key = comparable(key)
            lowest = key.masked_fill(stays, torch.inf).amin(-1, keepdim=True)
            stays = stays | (key > lowest)
        return self.positions.masked_fill(stays, -1).argmax(-1, keepdim=True)

    def rows(self) -> "list[Ranking]":
        """The rankings of single sequences, as views."""
        count, tensors = len(self.scores), self._tensors()
        if count == 1:
            return [self]  # its tensors may be those of other policies
        return [replace(self, **{name: x[row : row + 1] for name, x in tensors.items()}) for row in range(count)]

    @staticmethod
    def joined(rankings: "Sequence[Ranking]") -> "Ranking":
        """Rankings of single sequences by one policy as one."""
        parts = [ranking._tensors() for ranking in rankings]
        whole: dict[str, Any] = {name: rows_of([own[name] for own in parts]) for name in parts[0]}
        return replace(rankings[0], **whole)

    def _tensors(self) -> dict[str, Any]:
        """The fields that are tensors [B,...]."""
        named = ((each.name, getattr(self, each.name)) for each in fields(self))
        return {name: x for name, x in named if isinstance(x, Tensor)}

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


def within(positions: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    """[B,H_kv,T] bool: the stored tokens at positions [first, end) of any span."""
    found = torch.zeros_like(positions, dtype=torch.bool)
    for first, end in spans:
        found |= (positions >= first) & (positions < end)
    return found
