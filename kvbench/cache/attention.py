"""Which operation computes the attention of a step over the slots of its layer.

Shapes: B batch, H_q query heads, H_kv KV heads, G = H_q / H_kv, m queries of a step, C slots, D head dim.
"""

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.cache import attend as backends
from kvbench.cache.attend.torch import is_plain
from kvbench.cache.step import Step
from kvbench.kernels.query_sums import attention_moments, column_sums
from kvbench.kernels.references import FEW_QUERIES, Attended, visible, weigh
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
    if needs.newest_row and dense and step.phase == "decode":
        found = backends.backend_of(step.queries).attend_newest(step.observation)
        if found is not None:
            out, weights = found
            step.observation.known |= known_weights(weights)
            return out
    if step.phase == "decode" and step.observation.sees_all:
        return weigh(step.observation.window_attention(1), held.values) if needs.newest_row and dense else None
    return None if needs.sums is None else attend_and_sum(step.observation, needs.sums)


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
    in_order = _in_order(seen)
    if (found := backends.backend_of(queries).attend_prompt(seen, in_order)) is not None:
        sinks, (out, log_sum_exp) = None, found
    elif queries.element_size() == 2:
        return None
    else:
        in_order, attended = False, Attended(values, values.new_zeros(*queries.shape[:3], values.shape[-1]))
        out = attended.out
    given: dict[str, Any] = {"sinks": sinks, "log_sum_exp": log_sum_exp, "attended": attended}
    if statistic == "moments":
        seen.known["moment sums", 0], seen.known["moment squares", 0] = attention_moments(
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
    slots, window = held.slots, params.sliding_window
    covered = window is None or step.span.end <= window  # the window hides no token
    params = params._replace(sliding_window=None) if covered else params
    if step.fresh and is_plain(params) and slots.bias is None:
        gqa, causal = queries.shape[1] != held.keys.shape[1], queries.shape[2] > 1
        return F.scaled_dot_product_attention(
            queries, held.keys, held.values, is_causal=causal, scale=params.scaling, enable_gqa=gqa
        )
    in_order = step.fresh or (covered and queries.shape[2] > 1 and _newest_last(step))
    call = queries, step.positions, held, params
    return backends.backend_of(queries).attend_slots(*call, step.fresh, in_order)


def _newest_last(step: Step) -> bool:
    """Whether the last slots hold the tokens of this step in order, after older ones."""
    held = step.store
    if not (held.slots.packed and held.slots.ascending):
        return False
    if step.policy.schedule.order == "attend_then_evict":  # nothing was evicted since they were appended
        return True
    last = held.positions[:, :, -step.queries.shape[2] :]
    return last.shape[2] == step.queries.shape[2] and bool((last == step.positions[:, None]).all())
