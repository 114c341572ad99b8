"""One step of one layer, and the attention of its queries over the slots that the layer holds.

Shapes: B batch, H_q query heads, H_kv KV heads, G = H_q / H_kv, m queries of a step, C slots, D head dim.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.cache.progress import BatchStep
from kvbench.kernels.decode import decode_attention
from kvbench.kernels.prompt import attention_behind, masked_attention, one_for_all, prompt_attention
from kvbench.kernels.references import grouped_attention, visible
from kvbench.kernels.tiles import INTERPRETED, decodes, use_triton
from kvbench.policies.latents import LatentObservation
from kvbench.policies.model_layer import Latents
from kvbench.policies.needs import Needs
from kvbench.policies.observation import AttentionParams, Observation, StepCache
from kvbench.policies.stores.slot_store import SlotStore
from kvbench.policies.stores.store import CompressedStore, LayerStore


class QKV(NamedTuple):
    """New queries [B,H_q,m,D], keys and values [B,H_kv,m,D] of one layer, rotated as its attention receives them.

    A layer that stores latents has latents [B,1,m,R] as keys, and the rotated part of the keys as values.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor

    def for_query_heads(self) -> "QKV":
        """Keys and values once per query head, for policies that keep a token set per query head."""
        group = self.queries.shape[1] // self.keys.shape[1]
        return QKV(self.queries, *(x.repeat_interleave(group, dim=1) for x in self[1:]))

    def values_of_heads(self, params: AttentionParams) -> Tensor:
        """The values, or [B,H,m,D] of all heads that latents expand to."""
        return self.values if params.latents is None else params.latents.expand(self.keys, self.values)[1]

    def no_attention(self, params: AttentionParams) -> Tensor:
        """The attention output [B,H_q,m,D] of queries that see no token: 0."""
        dim = self.values.shape[-1] if params.latents is None else params.latents.value_dim
        return self.values.new_zeros(*self.queries.shape[:3], dim)


@dataclass(eq=False)  # not frozen, because a frozen dataclass is slower to create, and every layer and token has one
class LayerStep:
    """One step of one layer after its tokens were appended, before its attention and its eviction.

    queries [B,H_q,m,D]. now: the step's positions in prompt and answer. params: parameters of the attention. store: the
    slots that the queries attend to. fresh: the store holds exactly the tokens of this step, in order, for every head.
    observe: makes the observation of the policy; None: the policy does not observe the step. alone: the step is the
    whole call of the model. read: sparse attention; it returns None to attend to all slots. known: values that were
    computed for another policy in the same step.
    """

    queries: Tensor
    now: BatchStep
    params: AttentionParams
    store: LayerStore
    fresh: bool
    observe: Callable[["LayerStep"], Observation] | None = None
    alone: bool = True
    read: Callable[["LayerStep"], Tensor | None] | None = None
    known: StepCache | None = None
    _observation: Observation | None = field(default=None, init=False, repr=False)
    _attended: LayerStore | None = field(default=None, init=False, repr=False)

    def read_by(self, queries: Tensor, params: AttentionParams) -> "LayerStep":
        """This step for a layer that shares its keys and values: queries [B,H_q,n,D] of the last n tokens."""
        now, fresh = self.now, self.fresh
        if queries.shape[2] < self.queries.shape[2]:
            now, fresh = replace(now, positions=now.positions[:, -queries.shape[2] :]), False
        return LayerStep(queries, now, params, self.store, fresh, None, self.alone, self.read)

    def copied(self) -> "LayerStep":
        """This step over a copy of the slots, which later steps do not change."""
        held = self.store
        contents = {"keys": held.keys, "values": held.values, "positions": held.positions}
        if held.slots.bias is not None:
            contents["bias"] = held.slots.bias
        kept = SlotStore.of({name: x.clone() for name, x in contents.items()}, (), held.slots.ascending)
        return replace(self, store=kept, observe=None, read=deepcopy(self.read))

    @property
    def attended(self) -> LayerStore:
        """The store, or keys and values of all heads that were expanded from its latents."""
        latents = self.params.latents
        if latents is None:
            return self.store
        if self._attended is None:
            self._attended = _expanded(self.store, latents, {} if self.known is None else self.known)
        return self._attended

    @property
    def of_all_heads(self) -> "LayerStep":
        """The step of a layer with latents as the step of a layer with keys and values of every head."""
        params, observe = self.params._replace(latents=None), None
        if self.observe is not None:
            assert isinstance(self.observation, LatentObservation)
            heads = self.observation.heads
            observe = lambda _: heads  # noqa: E731
        return replace(self, store=self.attended, params=params, observe=observe)

    @property
    def observation(self) -> Observation:
        """The policy's observation of this step, made on first use."""
        if self._observation is None:  # `cached_property` takes a lock before Python 3.12
            assert self.observe is not None, "the policy does not observe this step"
            self._observation = self.observe(self)
        return self._observation


def _expanded(held: LayerStore, latents: Latents, known: StepCache) -> SlotStore:
    """Stored latents [B,1,C,...] as keys and values of all heads."""
    if "expanded keys" not in known:
        known["expanded keys"], known["expanded values"] = latents.expand(held.keys, held.values)
    keys, values = known["expanded keys"], known["expanded values"]
    positions = held.positions.expand(-1, keys.shape[1], -1).contiguous()
    contents = {"keys": keys, "values": values, "positions": positions}
    return SlotStore.of(contents, (), held.slots.ascending, held.slots.packed)


def attend(step: LayerStep, needs: Needs) -> Tensor:
    """Attention output [B,H_q,m,D] of a step over the slots of its store; 0 for queries that see no slot (padding).

    Weights and sums that the scorer needs of this attention are stored in `step.observation`.
    """
    if step.read is not None and (out := step.read(step)) is not None:
        return out
    if step.params.latents is not None:
        step = step.of_all_heads
    if step.observe is not None and (needs.newest_row or needs.sums is not None):
        out = _attend_with_statistics(step, needs)
        if out is not None:
            return out
    return _attend(step)


def attend_to_survivors(step: LayerStep, values: Tensor) -> Tensor:
    """Attention of a step after its eviction (CAOTE, eq. 5-7).

    A query that sees no remaining token attends to its own, values [B,H,m,D]. The output of padding is 0.
    """
    now, params = step.now, step.params
    out = attend(replace(step, fresh=False, observe=None), Needs())
    blind = ~visible(now.positions, step.store.positions, params.sliding_window).any(-1)  # [B,H_kv,m]
    blind &= (now.positions >= 0)[:, None]
    heads = out.shape[1] // values.shape[1], out.shape[1] // blind.shape[1]
    own, blind = (x.repeat_interleave(n, dim=1) for x, n in zip((values, blind), heads, strict=True))
    return torch.where(blind[..., None], own, out)


def _attend_with_statistics(step: LayerStep, needs: Needs) -> Tensor | None:
    """Attention that also computes the statistics of the scorer; None if separate passes are no slower."""
    held = step.store
    dense = isinstance(held, SlotStore) and held.starts is None
    if not (step.fresh or dense):
        return None
    if needs.newest_row and dense:
        out = step.observation.attend_newest()
        if out is not None:
            return out
    if step.now.phase == "decode" and step.now.aligned and step.observation.sees_all:
        return _weigh(step.observation.window_attention(1), held.values) if needs.newest_row and dense else None
    return None if needs.sums is None else step.observation.attend_and_sum(needs.sums)


def _attend(step: LayerStep) -> Tensor:
    """Attention by the first implementation that supports the step."""
    queries, now, params, held = step.queries, step.now, step.params, step.store
    if not step.fresh and (
        isinstance(held, CompressedStore) or (isinstance(held, SlotStore) and held.starts is not None)
    ):
        out = held.attend(queries, now.positions, params)  # on codes, or on heads of different lengths
        if out is not None:
            return out
    slots, window, scale = held.slots, params.sliding_window, params.scaling
    covered = window is None or (now.newest is not None and now.newest < window)  # the window hides no token
    plain = now.aligned and covered and slots.bias is None and params.softcap is None and params.sinks is None
    if step.fresh and plain:
        gqa, causal = queries.shape[1] != held.keys.shape[1], queries.shape[2] > 1
        return F.scaled_dot_product_attention(
            queries, held.keys, held.values, is_causal=causal, scale=scale, enable_gqa=gqa
        )
    if (not queries.is_cpu or INTERPRETED) and (out := _attend_by_kernel(step, covered)) is not None:
        return out
    if not step.fresh and plain and queries.shape[2] == 1 and slots.packed:
        return grouped_attention(queries, held.keys, held.values, None, scale)
    if not step.fresh and plain and _newest_last(step):
        return attention_behind(queries, held.keys, held.values, scale)
    call = queries, held.keys, held.values, now.positions, held.positions, scale, params.softcap, window
    return masked_attention(*call, params.sinks, columns=step.fresh, bias=slots.bias)


def _attend_by_kernel(step: LayerStep, covered: bool) -> Tensor | None:
    """Attention by a kernel for GPUs, None if no kernel supports the step; covered: a sliding window hides no token."""
    queries, now, params, held = step.queries, step.now, step.params, step.store
    stored, slots, window = (queries, held.keys, held.values), held.slots, params.sliding_window
    how = params.scaling, params.softcap
    if not step.fresh and decodes(queries):
        packed = now.aligned and covered and slots.packed
        places: tuple[Tensor | None, Tensor | None] = (None, None) if packed else (now.positions, held.positions)
        seen, sinks = None if covered else window, one_for_all(params.sinks)
        return decode_attention(*stored, *places, *how, seen, sinks, packed=packed, bias=slots.bias).out
    gradients = torch.is_grad_enabled() and queries.requires_grad
    if slots.bias is not None or not use_triton(queries) or not use_triton(held.values) or gradients:
        return None
    aligned = now.aligned and (step.fresh or (covered and _newest_last(step)))
    call = *stored, now.positions, held.positions, *how, window, one_for_all(params.sinks)
    return prompt_attention(*call, aligned=aligned).out


def _newest_last(step: LayerStep) -> bool:
    """Whether the last slots hold the tokens of this step in order, after older ones."""
    held = step.store
    if not (held.slots.packed and held.slots.ascending):
        return False
    last = held.positions[:, :, -step.queries.shape[2] :]
    return last.shape[2] == step.queries.shape[2] and bool((last == step.now.positions[:, None]).all())


def _weigh(rows: Tensor, values: Tensor) -> Tensor:
    """Attention output [B,H_q,m,D] of weights [B,H_kv,G,m,C] float32 over values [B,H_kv,C,D]."""
    batch, heads, group, new, slots = rows.shape
    weights = rows.view(batch * heads, group * new, slots).to(values.dtype)
    return torch.bmm(weights, values.flatten(0, 1)).view(batch, heads * group, new, -1)
