"""Attention of a step's queries over what a layer holds: the ways to compute it, and which one is taken.

Shapes: B batch, H_q query heads, H_kv KV heads, G = H_q / H_kv, m queries of a step, C slots, D head dim.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.cache.step import LayerStep
from kvbench.kernels.decode import decode_attention, decodes
from kvbench.kernels.prompt import attention_behind, grouped_attention, masked_attention, one_for_all, prompt_attention
from kvbench.kernels.references import visible
from kvbench.kernels.tiles import use_triton
from kvbench.policies.needs import Needs
from kvbench.policies.stores.dense import DenseStore
from kvbench.policies.stores.store import LayerStore


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
    if step.observed and (step.fresh or isinstance(step.store, DenseStore)):
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
    newest = needs.newest_row and isinstance(held, DenseStore)
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
