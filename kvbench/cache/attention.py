"""A layer step, and the attention of its queries over what the layer holds: the ways to compute it.

Shapes: B batch, H_q query heads, H_kv KV heads, G = H_q / H_kv, m queries of a step, C slots, D head dim.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.cache.steps import BatchStep
from kvbench.kernels.decode import decode_attention, decodes
from kvbench.kernels.prompt import attention_behind, grouped_attention, masked_attention, one_for_all, prompt_attention
from kvbench.kernels.references import visible
from kvbench.kernels.tiles import use_triton
from kvbench.policies.latents import LatentObservation
from kvbench.policies.model_layer import Latents
from kvbench.policies.needs import Needs
from kvbench.policies.observation import AttentionParams, Observation, StepCache
from kvbench.policies.stores.slot_store import SlotStore
from kvbench.policies.stores.store import LayerStore

ALL = slice(None)


class QKV(NamedTuple):
    """The new queries [B,H_q,m,D], keys and values [B,H_kv,m,D] of one layer, rotated as its attention takes them.

    Of a layer that stores latents, keys are the latents [B,1,m,R] and values the part of the keys that is rotated.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor

    def rows(self, rows: slice) -> "QKV":
        """Those of some of the sequences."""
        return self if rows == ALL else QKV(*(x[rows] for x in self))

    def columns(self, columns: slice) -> "QKV":
        """Those of some of the tokens."""
        whole = columns == slice(0, self.queries.shape[2])
        return self if whole else QKV(*(x[:, :, columns] for x in self))


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
    known: StepCache | None = None
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
        kept = SlotStore.of({name: x.clone() for name, x in contents.items()}, (), held.ascending)
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


def _expanded(held: LayerStore, latents: Latents, known: StepCache) -> SlotStore:
    """A view of stored latents, [B,1,C,...], with the keys and values of all heads."""
    if "expanded keys" not in known:
        known["expanded keys"], known["expanded values"] = latents.expand(held.keys, held.values)
    keys, values = known["expanded keys"], known["expanded values"]
    positions = held.positions.expand(-1, keys.shape[1], -1).contiguous()
    contents = {"keys": keys, "values": values, "positions": positions}
    return SlotStore.of(contents, (), held.ascending, held.packed)


def attend(step: LayerStep, needs: Needs) -> Tensor:
    """Attention output [B,H_q,m,D] of a step's queries over the held slots; queries that see none (padding) give 0.

    Where the scorer reads weights or sums of this very attention, they are left in `step.observation`.
    """
    if step.read is not None and (out := step.read(step)) is not None:
        return out
    if step.parts:
        return torch.cat([attend(part, needs) for part in step.parts])  # sequences of several lengths
    if step.params.latents is not None:
        step = step.of_all_heads
    if step.observed and (step.fresh or _dense(step.store)):
        out = _with_statistics(step, step.store, needs)
        if out is not None:
            return out
    for way in AMONG_THEMSELVES if step.fresh else OVER_WHAT_IS_HELD:
        out = way(step, step.store)
        if out is not None:
            return out
    raise AssertionError("the last way takes every step")


def attend_to_survivors(step: LayerStep, values: Tensor) -> Tensor:
    """Attention of a step whose eviction came first (CAOTE, eq. 5-7); a query that no survivor is visible to sees
    itself, padding and other steps' queries stay 0. values [B,H_kv,m,D], as attention reads them, are the step's own.
    """
    now, params = step.now, step.params
    out = attend(replace(step, fresh=False, observe=None, parts=()), Needs())
    blind = ~visible(now.positions, step.store.positions, params.sliding_window).any(-1)  # [B,H_kv,m]
    blind &= (now.positions >= 0)[:, None]
    group = out.shape[1] // values.shape[1]
    own = values.repeat_interleave(group, dim=1)
    return torch.where(blind.repeat_interleave(group, dim=1)[..., None], own, out)


def _with_statistics(step: LayerStep, held: LayerStore, needs: Needs) -> Tensor | None:
    """Attention that also yields what the scorer reads; None where that is no better than computing it apart."""
    newest = needs.newest_row and _dense(held)
    if not newest and needs.sums is None:
        return None
    if newest:
        out = step.observation.attend_newest()
        if out is not None:
            return out
    if step.now.phase == "decode" and step.now.aligned and step.observation.sees_all:
        return weigh(step.observation.window_attention(1), held.values) if newest else None
    return None if needs.sums is None else step.observation.attend_and_sum(needs.sums)


# The ways, each None where a step is not its case; the first that takes the step is the one.
def _of_the_store(step: LayerStep, held: LayerStore) -> Tensor | None:
    """Straight on codes, or on heads of different lengths."""
    return held.attend(step.queries, step.now.positions, step.params)


def _decode_kernel(step: LayerStep, held: LayerStore) -> Tensor | None:
    """One query of every sequence on a GPU, which need not look at positions where it sees every slot."""
    if not decodes(step.queries):
        return None
    now, params = step.now, step.params
    packed = now.aligned and _inside(step) and held.packed
    places: tuple[Tensor | None, Tensor | None] = (None, None) if packed else (now.positions, held.positions)
    window = None if _inside(step) else params.sliding_window
    asked = (*places, params.scaling, params.softcap, window, one_for_all(params.sinks))
    return decode_attention(step.queries, held.keys, held.values, *asked, packed=packed, bias=held.bias).out


def _causal(step: LayerStep, held: LayerStore) -> Tensor | None:
    """A prompt among its own tokens: PyTorch's."""
    if not _plain(step):
        return None
    queries, keys = step.queries, held.keys
    gqa = queries.shape[1] != keys.shape[1]
    return F.scaled_dot_product_attention(
        queries, keys, held.values, is_causal=queries.shape[2] > 1, scale=step.params.scaling, enable_gqa=gqa
    )


def _one_query(step: LayerStep, held: LayerStore) -> Tensor | None:
    """One query that sees every slot."""
    if step.queries.shape[2] != 1 or not (held.packed and _plain(step)):
        return None
    return grouped_attention(step.queries, held.keys, held.values, None, step.params.scaling)


def _prompt_kernel(step: LayerStep, held: LayerStore) -> Tensor | None:
    """Many queries over any slots without a bias, on a GPU."""
    queries, now, params = step.queries, step.now, step.params
    if (
        held.bias is not None
        or not (use_triton(queries) and use_triton(held.values))
        or (torch.is_grad_enabled() and queries.requires_grad)
    ):
        return None
    call = (
        queries,
        held.keys,
        held.values,
        now.positions,
        held.positions,
        params.scaling,
        params.softcap,
        params.sliding_window,
    )
    aligned = now.aligned and (step.fresh or (_inside(step) and _newest_last(step, held)))
    return prompt_attention(*call, one_for_all(params.sinks), aligned=aligned).out


def _behind(step: LayerStep, held: LayerStore) -> Tensor | None:
    """A block of a prompt that sees all the older tokens, and itself as a prompt does."""
    if not (_plain(step) and _newest_last(step, held)):
        return None
    return attention_behind(step.queries, held.keys, held.values, step.params.scaling)


def _masked(step: LayerStep, held: LayerStore) -> Tensor:
    """Everything else, a few queries at a time."""
    now, params = step.now, step.params
    call = step.queries, held.keys, held.values, now.positions, held.positions
    return masked_attention(
        *call, params.scaling, params.softcap, params.sliding_window, params.sinks, columns=step.fresh, bias=held.bias
    )


def _dense(held: LayerStore) -> bool:
    """Whether all segments are of one length, in full precision."""
    return isinstance(held, SlotStore) and held.starts is None


Way = Callable[[LayerStep, LayerStore], Tensor | None]
AMONG_THEMSELVES: tuple[Way, ...] = (_causal, _prompt_kernel, _masked)
"""For a step whose tokens are all that is held."""
OVER_WHAT_IS_HELD: tuple[Way, ...] = (_of_the_store, _decode_kernel, _one_query, _prompt_kernel, _behind, _masked)


def _newest_last(step: LayerStep, held: LayerStore) -> bool:
    """Whether the last slots hold this step's tokens in order, after older ones: none was evicted before it attends."""
    if not (held.packed and held.ascending):
        return False
    last = held.positions[:, :, -step.queries.shape[2] :]
    return last.shape[2] == step.queries.shape[2] and bool((last == step.now.positions[:, None]).all())


def _inside(step: LayerStep) -> bool:
    """Whether a sliding window, if there is one, still covers all that was seen."""
    window, newest = step.params.sliding_window, step.now.newest
    return window is None or (newest is not None and newest < window)


def _plain(step: LayerStep) -> bool:
    """Attention that needs no mask but causality, and nothing but a softmax."""
    if step.store.bias is not None:
        return False
    return step.now.aligned and _inside(step) and step.params.softcap is None and step.params.sinks is None


def weigh(rows: Tensor, values: Tensor) -> Tensor:
    """Attention output [B,H_q,m,D] of known weights [B,H_kv,G,m,C] float32 over values [B,H_kv,C,D]."""
    batch, heads, group, new, slots = rows.shape
    weights = rows.view(batch * heads, group * new, slots).to(values.dtype)
    return torch.bmm(weights, values.flatten(0, 1)).view(batch, heads * group, new, -1)
