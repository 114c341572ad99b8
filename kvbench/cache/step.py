"""A layer step: what one layer did in one step of a call, as its attention, its policy and its store see it.

Shapes: B batch, H_q query heads, H_kv KV heads, m tokens of a step, D head dim.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor

from kvbench.cache.steps import BatchStep
from kvbench.policies.latents import LatentObservation
from kvbench.policies.model_layer import Latents
from kvbench.policies.observation import AttentionParams, Known, Observation
from kvbench.policies.stores.dense import DenseStore
from kvbench.policies.stores.store import LayerStore

ALL = slice(None)


class Projected(NamedTuple):
    """The new queries [B,H_q,m,D], keys and values [B,H_kv,m,D] of one layer, rotated as its attention takes them.

    Of a layer that stores latents, keys are the latents [B,1,m,R] and values the part of the keys that is rotated.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor

    def rows(self, rows: slice) -> "Projected":
        """Those of some of the sequences."""
        return self if rows == ALL else Projected(*(x[rows] for x in self))

    def columns(self, columns: slice) -> "Projected":
        """Those of some of the tokens."""
        whole = columns == slice(0, self.queries.shape[2])
        return self if whole else Projected(*(x[:, :, columns] for x in self))


@dataclass(eq=False)  # not frozen, as in `Observation`
class LayerStep:
    """One step of one layer: its tokens are appended, its attention and its eviction are to come.

    queries [B,H_q,m,D]. now: where the step stands in the prompt or the answer. params: parameters of the attention.
    store: what the queries attend to. fresh: exactly this step's tokens are held, in order, for every head. alone: the
    call of the model is this one step. read: attention where the policy reads less than is held; it gives None where
    all is read. rows: the sequences it is about. parts: the same step by length, where sequences of several lengths
    share a store. observe: makes what the policy sees; None where the policy sees nothing. known: what was computed of
    the very same step for another policy.
    """

    queries: Tensor
    now: BatchStep
    params: AttentionParams
    store: LayerStore
    fresh: bool
    observe: Callable[["LayerStep"], Observation] | None = None
    alone: bool = True
    read: Callable[["LayerStep"], Tensor | None] | None = None
    rows: slice = field(default_factory=lambda: ALL)
    parts: tuple["LayerStep", ...] = ()
    known: Known | None = None
    _seen: Observation | None = field(default=None, init=False, repr=False)
    _read: LayerStore | None = field(default=None, init=False, repr=False)

    def of(self, rows: slice, store: LayerStore) -> "LayerStep":
        """The step of some of the sequences, which `store` holds."""
        now = self.now.of(rows)
        return LayerStep(self.queries[rows], now, self.params, store, self.fresh, self.observe, self.alone, rows=rows)

    def read_by(self, queries: Tensor, params: AttentionParams) -> "LayerStep":
        """The step as another layer reads it: queries [B,H_q,n,D] of its last n tokens, unseen by the policy."""
        now, fresh = self.now, self.fresh
        if queries.shape[2] < self.queries.shape[2]:
            now, fresh = replace(now, positions=now.positions[:, -queries.shape[2] :]), False
        parts = tuple(part.read_by(queries[part.rows], params) for part in self.parts)
        return LayerStep(queries, now, params, self.store, fresh, None, self.alone, self.read, self.rows, parts)

    def copied(self) -> "LayerStep":
        """The step over a copy of what is held now, which no later step changes."""
        held = self.store
        contents = {"keys": held.keys, "values": held.values, "positions": held.positions}
        if held.bias is not None:
            contents["bias"] = held.bias
        kept = DenseStore.of({name: x.clone() for name, x in contents.items()}, (), held.ascending)
        return replace(self, store=kept, observe=None, parts=(), read=deepcopy(self.read))

    @property
    def attended(self) -> LayerStore:
        """What attention reads: the store, or, where it holds latents, keys and values of all heads made of them."""
        latents = self.params.latents
        if latents is None:
            return self.store
        if self._read is None:
            self._read = _expanded(self.store, latents, {} if self.known is None else self.known)
        return self._read

    @property
    def of_all_heads(self) -> "LayerStep":
        """The step of a layer that stores latents as one of a layer that stores every head's keys and values."""
        params, observe = self.params._replace(latents=None), None
        if self.observed:
            assert isinstance(self.observation, LatentObservation)
            heads = self.observation.heads
            observe = lambda _: heads  # noqa: E731
        return replace(self, store=self.attended, params=params, observe=observe)

    @property
    def observed(self) -> bool:
        """Whether the policy sees this step."""
        return self.observe is not None

    @property
    def observation(self) -> Observation:
        """What the policy sees; made once, when it is first asked for."""
        if self._seen is None:  # no `cached_property`: before Python 3.12 it takes a lock, in every layer of a step
            assert self.observe is not None, "the policy sees nothing of this step"
            self._seen = self.observe(self)
        return self._seen


def _expanded(held: LayerStore, latents: Latents, known: Known) -> DenseStore:
    """A view of stored latents, [B,1,C,...], with the keys and values of all heads."""
    if "expanded keys" not in known:
        known["expanded keys"], known["expanded values"] = latents.expand(held.keys, held.values)
    keys, values = known["expanded keys"], known["expanded values"]
    positions = held.positions.expand(-1, keys.shape[1], -1).contiguous()
    contents = {"keys": keys, "values": values, "positions": positions}
    return DenseStore.of(contents, (), held.ascending, held.packed)
