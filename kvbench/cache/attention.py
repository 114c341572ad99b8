"""Which operation computes the attention of a step over the slots of its layer.

Shapes: B batch, H_q query heads, H_kv KV heads, G = H_q / H_kv, m queries of a step, C slots, D head dim.
"""

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.cache.step import Step
from kvbench.kernels.decode import decode_attention
from kvbench.kernels.prompt import attention_behind, masked_attention, prompt_attention
from kvbench.kernels.query_sums import attention_moments, column_sums
from kvbench.kernels.references import FEW_QUERIES, Attended, grouped_attention, visible, weigh
from kvbench.kernels.tiles import INTERPRETED, decodes, use_triton
from kvbench.policies.needs import Needs
from kvbench.policies.observation import Observation, known_weights
from kvbench.policies.stores.slot_store import SlotStore


def attend(step: Step, needs: Needs) -> Tensor:
    """Attention output [B,H_q,m,D] of a step over the slots of its store; 0 for queries that see no slot (padding).

    Weights and sums that the scorer needs of this attention are stored in `step.observation`.
    """
    if step.pages is not None:
        call = step.queries, step.positions, step.store, step.params
        out = step.pages.attend(*call, step.sequence.budgets.prompt)
        if out is not None:
            return out
    if step.params.latents is not None:
        step = step.of_all_heads
    if step.observed and (needs.newest_row or needs.sums is not None):
        out = _attend_with_statistics(step, needs)
        if out is not None:
            return out
    return _attend(step)


def attend_to_survivors(step: Step) -> Tensor:
    """Attention of a step after its eviction (CAOTE, eq. 5-7).

    A query that sees no remaining token attends to its own.
    """
    values = step.values
    if step.params.latents is not None:
        values = step.params.latents.expand(step.keys, values)[1]
    out = attend(replace(step, fresh=False, observed=False), Needs())
    blind = ~visible(step.positions, step.store.positions, step.params.sliding_window).any(-1)  # [1,H_kv,m]
    heads = out.shape[1] // values.shape[1], out.shape[1] // blind.shape[1]
    own, blind = (x.repeat_interleave(n, dim=1) for x, n in zip((values, blind), heads, strict=True))
    return torch.where(blind[..., None], own, out)


def _attend_with_statistics(step: Step, needs: Needs) -> Tensor | None:
    """Attention that also computes the statistics of the scorer; None if separate passes are no slower."""
    held = step.store
    dense = isinstance(held, SlotStore) and held.starts is None
    if not (step.fresh or dense):
        return None
    if needs.newest_row and dense:
        out = _attend_newest(step.observation)
        if out is not None:
            return out
    if step.phase == "decode" and step.observation.sees_all:
        return weigh(step.observation.window_attention(1), held.values) if needs.newest_row and dense else None
    return None if needs.sums is None else attend_and_sum(step.observation, needs.sums)


def _attend_newest(seen: Observation) -> Tensor | None:
    """Attention output [B,H_q,m,D] of a decoded token by a kernel that stores its weights for the scorer.

    None without such a kernel.
    """
    if seen.phase != "decode" or not decodes(seen.queries):
        return None
    packed = seen.sees_all
    places: tuple[Tensor | None, Tensor | None] = (None, None) if packed else (seen.query_positions, seen.positions)
    call = seen.queries, seen.keys, seen.values, *places, *seen.params.for_kernels
    attention = decode_attention(*call, packed=packed, weights=True, bias=seen.slots.bias)
    assert attention.weights is not None
    seen.known |= known_weights(attention.weights)
    return attention.out


def attend_and_sum(seen: Observation, statistic: Literal["column_sums", "moments"]) -> Tensor | None:
    """Attention output of this step, [B,H_q,M,D], and the statistic, which is stored.

    On a CPU both come from the same rows; on a GPU a second pass computes the statistic from the log-sum-exp. None
    if separate attention is better: for few queries, with a bias, with gradients, and in 16 bits on a CPU, where
    PyTorch's attention rounds differently, so that other policies of the same prompt would change the result.
    """
    queries, values, sinks = seen.queries, seen.values, seen.params.sinks
    gradients = torch.is_grad_enabled() and queries.requires_grad
    if seen.slots.bias is not None or queries.shape[2] <= FEW_QUERIES or gradients:
        return None
    call = seen.query_positions, seen.positions, *seen.params[:3]
    attended = log_sum_exp = None
    if use_triton(queries) and use_triton(values):
        sinks, in_order = None, _in_order(seen)
        how = *call[:2], *seen.params.for_kernels
        out, log_sum_exp, _ = prompt_attention(queries, seen.keys, values, *how, in_order)
    elif queries.element_size() == 2:
        return None
    else:
        attended, in_order = Attended(values, values.new_zeros(*queries.shape[:3], values.shape[-1])), False
        out = attended.out
    given: dict[str, Any] = {"sinks": sinks, "log_sum_exp": log_sum_exp, "attended": attended}
    if statistic == "moments":
        seen.known["first", 0], seen.known["second", 0] = attention_moments(
            queries, seen.keys, *call, aligned=in_order, **given
        )
    else:
        seen.known["column_sums", 0] = column_sums(queries, seen.keys, *call, aligned=in_order, **given)
    return out


def _in_order(seen: Observation) -> bool:
    """Whether the slots hold all tokens in order and this step's last, so that kernels need no positions.

    A sliding window counts positions, which equal slots only until an eviction.
    """
    last = seen.sequences.last
    if not (seen.slots.ascending and seen.slots.packed):
        return False
    return seen.params.sliding_window is None or (last is not None and seen.positions.shape[2] == last + 1)


def _attend(step: Step) -> Tensor:
    """Attention by the first implementation that supports the step."""
    queries, params, held = step.queries, step.params, step.store
    out = None if step.fresh else held.attend(queries, step.positions, params)  # of codes, or heads unlike in length
    if out is not None:
        return out
    slots, window, scale = held.slots, params.sliding_window, params.scaling
    covered = window is None or step.span.end <= window  # the window hides no token
    plain = covered and slots.bias is None and params.softcap is None and params.sinks is None
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
    call = queries, held.keys, held.values, step.positions, held.positions, scale, params.softcap, window
    return masked_attention(*call, params.sinks, columns=step.fresh, bias=slots.bias)


def _attend_by_kernel(step: Step, covered: bool) -> Tensor | None:
    """Attention by a kernel for GPUs, None if no kernel supports the step; covered: a sliding window hides no token."""
    queries, params, held = step.queries, step.params, step.store
    stored, slots = (queries, held.keys, held.values), held.slots
    if not step.fresh and decodes(queries):
        packed = covered and slots.packed
        places: tuple[Tensor | None, Tensor | None] = (None, None) if packed else (step.positions, held.positions)
        how = params._replace(sliding_window=None) if covered else params
        newest = *stored, *places, *how.for_kernels
        return decode_attention(*newest, packed=packed, bias=slots.bias).out
    gradients = torch.is_grad_enabled() and queries.requires_grad
    if slots.bias is not None or not use_triton(queries) or not use_triton(held.values) or gradients:
        return None
    aligned = step.fresh or (covered and _newest_last(step))
    call = *stored, step.positions, held.positions, *params.for_kernels
    return prompt_attention(*call, aligned=aligned).out


def _newest_last(step: Step) -> bool:
    """Whether the last slots hold the tokens of this step in order, after older ones."""
    held = step.store
    if not (held.slots.packed and held.slots.ascending):
        return False
    if step.policy.schedule.order == "attend_then_evict":  # nothing was evicted since they were appended
        return True
    last = held.positions[:, :, -step.queries.shape[2] :]
    return last.shape[2] == step.queries.shape[2] and bool((last == step.positions[:, None]).all())
