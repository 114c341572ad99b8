"""The interface of a merger, which changes kept tokens when tokens are evicted.

Shapes: B batch, H_kv KV heads, T slots, D head dim.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from kvbench.kernels.selection import partitioned, take
from kvbench.policies.constants import on_device
from kvbench.policies.needs import Needs
from kvbench.policies.observation import Memory, Observation, Phase, State
from kvbench.policies.stores.slots import padded


@dataclass(frozen=True)
class Eviction:
    """A layer, or several as rows, just before an eviction, with masks of `kept` and `evicted` slots, bool [B,H_kv,T].

    layer: -1 if there are several. keys, values [B,H_kv,T,D]; positions [B,H_kv,T] (-1 = empty); state as for the
    scorer. seen: their observation (the newest queries, ...); None if single tokens are evicted. sizes: kept slots in
    every head of each row, if no slot is empty and tokens are in order of position.
    """

    layer: int
    phase: Phase
    keys: Tensor
    values: Tensor
    positions: Tensor
    state: State
    kept: Tensor
    evicted: Tensor
    seen: Observation | None = None
    sizes: Sequence[int] | None = None

    @cached_property
    def in_order(self) -> "tuple[Slots, Slots]":
        """The kept and the evicted slots of every head, the oldest position first.

        With `sizes`, padding of the kept slots names evicted ones, which may be written.
        """
        if self.sizes is None:
            return in_order(self.kept, self.positions), in_order(self.evicted, self.positions)
        order, slots = partitioned(self.kept), self.kept.shape[-1]
        counts = on_device(tuple(self.sizes), order.device)[:, None, None]
        found = []
        evicted = order.flip(-1), slots - counts, slots - min(self.sizes)
        for own, number, most in ((order, counts, max(self.sizes)), evicted):
            chosen = own[..., :most]
            found.append(Slots(chosen, (torch.arange(most, device=order.device) < number).expand_as(chosen)))
        return found[0], found[1]

    @property
    def even(self) -> bool:
        """Whether `sizes` are known and equal, so that no row of `in_order` has padding."""
        return self.sizes is not None and len(set(self.sizes)) == 1


class Vectors:
    """Keys or values [B,H_kv,T,D] of one layer, or of several as rows of one batch, not copied from their stores."""

    def __init__(self, layers: Sequence[Tensor]) -> None:
        self.layers = layers

    def whole(self) -> Tensor:
        """Return one tensor; several layers are copied and padded with zeros."""
        return padded(self.layers)

    def each(self, function: Callable[[Tensor, Tensor], Tensor], rows: Tensor) -> list[Tensor]:
        """Apply the function to every layer and its rows of a tensor [B,...]."""
        own = rows.split([len(layer) for layer in self.layers])
        return [function(layer, part) for layer, part in zip(self.layers, own, strict=True)]

    def at(self, slots: Tensor) -> Tensor:
        """The vectors at slots [B,H_kv,n]: [B,H_kv,n,D]."""
        return padded(self.each(take, slots))


@dataclass(frozen=True)
class OneEviction:
    """An eviction of one token per KV head: slots `victims` [B,H_kv,1], in the sequences `going` bool [B,1,1].

    going None: in every sequence. packed: no slot of a layer is empty. At least one token is kept in every head.
    """

    layer: int
    phase: Phase
    keys: Vectors
    values: Vectors
    positions: Tensor
    state: State
    victims: Tensor
    going: Tensor | None = None
    packed: bool = False

    def masks(self) -> Eviction:
        """The eviction as bool masks over all slots."""
        occupied = self.positions >= 0
        evicted = torch.zeros_like(occupied).scatter_(-1, self.victims, True) & occupied
        if self.going is not None:
            evicted &= self.going
        view = self.layer, self.phase, self.keys.whole(), self.values.whole(), self.positions, self.state
        return Eviction(*view, occupied & ~evicted, evicted)


@dataclass(frozen=True)
class Merged:
    """New contents of kept slots: slots [B,H_kv,n] long, keys and values [B,H_kv,n,D]; other slots do not change.

    bias [B,H_kv,n] float32: added to the logits of these slots from now on, for mergers with `needs.bias`; not
    supported when single tokens are evicted. in_order: the slots are all kept ones, as in `Eviction.in_order`.
    """

    slots: Tensor
    keys: Tensor
    values: Tensor
    bias: Tensor | None = None
    in_order: bool = False


class Slots(NamedTuple):
    """Slots [B,H,n] of each KV head in order of position; `present` [B,H,n] is False for padding."""

    slots: Tensor
    present: Tensor


def in_order(chosen: Tensor, positions: Tensor) -> Slots:
    """The chosen slots, bool [B,H,T], of every head, the oldest position first."""
    most = int(chosen.sum(-1).max())
    late = torch.iinfo(torch.int64).max
    slots = positions.long().masked_fill(~chosen, late).argsort(dim=-1, stable=True)[..., :most]
    return Slots(slots, chosen.gather(-1, slots))


MergeState = Memory
"""A merger's state of one layer between evictions (thresholds, ...)."""


class Merger:
    """Merges evicted tokens into kept tokens. Subclasses are frozen dataclasses whose fields are their parameters."""

    needs: ClassVar[Needs] = Needs()
    """Inputs besides keys, values and positions: the layer index, running statistics of the scorer, the newest queries
    (`Eviction.seen`); whether the merger gives slots a bias, and whether it has data per layer once it has
    evicted."""

    merges: ClassVar[bool] = True
    """Whether kept keys or values may change at an eviction."""

    def absorb(self, eviction: Eviction, memory: MergeState) -> Merged | None:
        """Return new contents of kept slots, or None if nothing changes. May update only `memory`."""
        return None

    def absorb_one(self, eviction: OneEviction, memory: MergeState) -> Merged | None:
        """`absorb` for a single token per KV head, called in every decoding step. Override it with a faster version."""
        return self.absorb(eviction.masks(), memory)

    def for_example(self, run_seed: int, example: int) -> Self:
        """The merger for one example of a run; only mergers with random numbers differ between examples."""
        return self
