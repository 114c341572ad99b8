"""The attention of a group in one layer of a call: append, attend and evict, step by step.

Shapes: B batch, H_q query heads, M new tokens, D head dim.
"""

from collections.abc import Sequence

from torch import Tensor

from kvbench.cache.attention import QKV, LayerStep, attend, attend_to_survivors
from kvbench.cache.eviction import Evictions
from kvbench.cache.group import PolicyGroup
from kvbench.cache.shared import SharedReads
from kvbench.cache.steps import BatchStep
from kvbench.policies.observation import AttentionParams, StepCache
from kvbench.policies.stores.slots import owned


class GroupAttention:
    """Attention of the groups of a cache, with its evictions and the keys and values that layers share."""

    def __init__(self, evictions: Evictions, shared: SharedReads) -> None:
        self._evictions, self._shared = evictions, shared

    def attend(self, group: PolicyGroup, index: int, new: QKV, params: AttentionParams) -> Tensor:
        """The attention output [B,H_q,M,D] of a group in layer `index`; 0 after an error."""
        if group.error is None:
            try:
                new, steps = group.layers[index].prepare(new), [step.to(new.queries.device) for step in group.steps]
                if len(steps) == 1 and steps[0].positions.shape[1] == new.queries.shape[2]:
                    return self._step(group, index, new, steps[0], params, alone=True)
                out = _no_attention(new, params)
                for now in steps:
                    some = new.columns(now.columns)
                    out[:, :, now.columns] += self._step(group, index, some, now, params, alone=len(steps) == 1)
                return out
            except Exception as error:
                group.fail(error)
        return _no_attention(new, params)

    def _step(
        self, group: PolicyGroup, index: int, new: QKV, now: BatchStep, params: AttentionParams, alone: bool
    ) -> Tensor:
        """One step of the schedule: append, then attend and evict in the order of the policy."""
        layer, step = group.layers[index], group.append(index, new, now, params, alone)
        if group.policy.schedule.order == "attend_then_evict":
            out = attend(step, group.policy.needs)
            self._shared.add(group, layer, step, new.values)
            self._evictions.add(group, layer, step, self._shared.delays(layer, step))
            return out
        self._evictions.add(group, layer, step)
        self._shared.add(group, layer, step, new.values)
        own = new.values if params.latents is None else params.latents.expand(new.keys, new.values)[1]
        return attend_to_survivors(step, own)

    def once(self, groups: Sequence[PolicyGroup], index: int, new: QKV, params: AttentionParams) -> Tensor:
        """Attention of several policies that process one prompt: it and their observations are computed once."""
        new = QKV(new.queries, owned(new.keys), owned(new.values))  # copied once if they are views
        known: dict[str, StepCache] = {}
        steps: dict[PolicyGroup, LayerStep] = {}
        for group in groups:
            if group.error is None:
                try:
                    own, (now,) = group.layers[index].prepare(new), (one.to(new.queries.device) for one in group.steps)
                    shared = known.setdefault(group.policy.granularity, {})
                    steps[group] = group.append(index, own, now, params, True, shared)
                except Exception as error:
                    group.fail(error)
        if not steps:
            return _no_attention(new, params)
        first = min(steps, key=_cost)
        out = attend(steps[first], first.policy.needs)
        self._shared.add(first, first.layers[index], steps[first], new.values)
        for group, step in steps.items():
            try:
                layer = group.layers[index]
                self._evictions.add(group, layer, step, self._shared.delays(layer, step))
            except Exception as error:
                group.fail(error)
        return out


def _no_attention(new: QKV, params: AttentionParams) -> Tensor:
    """The attention output of queries that see no token: 0."""
    dim = new.values.shape[-1] if params.latents is None else params.latents.value_dim
    return new.values.new_zeros(*new.queries.shape[:3], dim)


def _cost(group: PolicyGroup) -> tuple[bool, bool]:
    """The group with the lowest cost computes the attention for all: with KV heads as they are, and with sums."""
    return group.policy.granularity == "query_head", group.policy.needs.sums is None
