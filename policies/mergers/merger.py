"""The contract of a merger: what becomes of the evicted.

Shapes: B batch, H_kv KV heads, T slots, D head dim.
"""

from abc import ABC
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from kvbench.policies.observation import Phase, State


@dataclass(frozen=True)
class Eviction:
    """One layer at the moment of an eviction: slots that stay (`kept`) and slots that go (`evicted`), bool [B,H_kv,T].

    keys, values [B,H_kv,T,D] and positions [B,H_kv,T] (-1 = empty) are still those before it; state as for the scorer.
    """

    layer: int
    phase: Phase
    keys: Tensor
    values: Tensor
    positions: Tensor
    state: State
    kept: Tensor
    evicted: Tensor


@dataclass(frozen=True)
class OneEviction:
    """The same where one token goes in every KV head: slots `victims` [B,H_kv,1], in the sequences `going` [B,1,1].

    going None: in every sequence. packed: no slot is empty. At least one token stays in every KV head.
    """

    layer: int
    phase: Phase
    keys: Tensor
    values: Tensor
    positions: Tensor
    state: State
    victims: Tensor
    going: Tensor | None = None
    packed: bool = False

    def masks(self) -> Eviction:
        """As bool masks over all slots."""
        occupied = self.positions >= 0
        evicted = torch.zeros_like(occupied).scatter_(-1, self.victims, True) & occupied
        if self.going is not None:
            evicted &= self.going
        kept = occupied & ~evicted
        return Eviction(self.layer, self.phase, self.keys, self.values, self.positions, self.state, kept, evicted)


@dataclass(frozen=True)
class Merged:
    """New contents of kept slots: slots [B,H_kv,n] long, keys and values [B,H_kv,n,D]; the others are untouched."""

    slots: Tensor
    keys: Tensor
    values: Tensor


class Slots(NamedTuple):
    """Slots [B,H,n] of each KV head in order of position; `present` [B,H,n] is False beyond a head's own number."""

    slots: Tensor
    present: Tensor


def in_order(chosen: Tensor, positions: Tensor) -> Slots:
    """The chosen slots, bool [B,H,T], of every head, the oldest position first."""
    most = int(chosen.sum(-1).max())
    late = torch.iinfo(torch.int64).max
    slots = positions.long().masked_fill(~chosen, late).argsort(dim=-1, stable=True)[..., :most]
    return Slots(slots, chosen.gather(-1, slots))


MergeState = dict[str, Tensor]
"""What a merger remembers of one layer between evictions (thresholds, ...), [B,...] each; counted as held bytes."""


class Merger(ABC):
    """Decides whether evicted tokens leave a trace in kept ones. Subclasses are frozen dataclasses of their knobs."""

    merges: ClassVar[bool]
    """Whether kept keys or values may change at an eviction."""

    reads_layer: ClassVar[bool] = False
    """Whether what it does depends on which layer it is."""

    reads_statistics: ClassVar[tuple[str, ...]] = ()
    """Running statistics of the scorer that it reads."""

    def absorb(self, eviction: Eviction, memory: MergeState) -> Merged | None:
        """New contents of kept slots, or None where nothing changes; may update `memory`, nothing else."""
        return None

    def absorb_one(self, eviction: OneEviction, memory: MergeState) -> Merged | None:
        """The same for a single token per KV head: each step of decoding ends here, so a short way pays."""
        return self.absorb(eviction.masks(), memory)
