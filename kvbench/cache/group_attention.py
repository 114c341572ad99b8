"""The attention of one layer in one call, for the sequences of several policies: append, attend, evict as scheduled.

Shapes: B batch, H_q query heads, H_kv KV heads, M new tokens, D head dim.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from kvbench.cache.attention import QKV, LayerStep, attend, attend_to_survivors
from kvbench.cache.device_batch import DeviceBatch
from kvbench.cache.eviction import Evictions
from kvbench.cache.group import PolicyGroup
from kvbench.cache.shared import SharedReads
from kvbench.cache.state import LayerState
from kvbench.cache.steps import BatchStep
from kvbench.policies.observation import AttentionParams, StepCache
from kvbench.policies.stores.slots import owned


class GroupAttention:
    """Attention of the groups of a cache; evictions: of that cache; shared: what later layers of the call read too.

    `index` is the layer's place among the attention layers; all methods return the attention output [B,H_q,M,D].
    """

    def __init__(self, evictions: Evictions, shared: SharedReads) -> None:
        self.evictions = evictions
        self._shared = shared

    def each(self, rows: Iterable[tuple[PolicyGroup, slice]], index: int, new: QKV, params: AttentionParams) -> Tensor:
        """Group by group, each with its rows of the call."""
        parts = [self._isolated(group, index, new.rows(own), params) for group, own in rows]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def on_device(
        self,
        batch: DeviceBatch,
        rows: Mapping[PolicyGroup, slice],
        index: int,
        new: QKV,
        params: AttentionParams,
    ) -> Tensor:
        """A decoded token of every sequence: at once for those in the batch, policy by policy for the others."""
        if len(rows) == len(batch.groups):
            return batch.attend(index, new, params)
        inside = [torch.cat([x[rows[group]] for group in batch.groups]) for x in new]
        found = batch.attend(index, QKV(*inside), params).split([group.size for group in batch.groups])
        outs = dict(zip(batch.groups, found, strict=True))
        for group in rows.keys() - outs.keys():
            outs[group] = self._isolated(group, index, new.rows(rows[group]), params)
        return torch.cat([outs[group] for group in rows])

    def once(self, groups: Sequence[PolicyGroup], index: int, new: QKV, params: AttentionParams) -> Tensor:
        """A prompt that several policies read whole: attention is computed once, and what they observe too."""
        new = QKV(new.queries, owned(new.keys), owned(new.values))  # of a fused projection, once for all
        known: dict[str, StepCache] = {}
        steps: dict[PolicyGroup, LayerStep] = {}
        for group in groups:
            if group.error is not None:
                continue
            try:
                layer, (now,) = group.layers[index], group.steps_on(new.queries)
                context = group.context(known.setdefault(group.policy.granularity, {}))
                steps[group] = layer.append(layer.prepare(new), now, params, True, context)
                group.note_bytes(index)
            except Exception as error:
                group.fail(error)
        if not steps:
            return _nothing(new, params)
        reader = min(steps, key=_cost)
        out = attend(steps[reader], reader.policy.needs)
        self._shared.add(reader, reader.layers[index], steps[reader], new.values)
        for group, step in steps.items():
            try:
                self._evict(group, group.layers[index], step)
            except Exception as error:
                group.fail(error)
        return out

    def _isolated(self, group: PolicyGroup, index: int, new: QKV, params: AttentionParams) -> Tensor:
        """Of one group, where an error may end that group alone: what its sequences read is then 0."""
        if group.error is None:
            try:
                return self._steps(group, index, new, params)
            except Exception as error:
                group.fail(error)
        return _nothing(new, params)

    def _steps(self, group: PolicyGroup, index: int, new: QKV, params: AttentionParams) -> Tensor:
        """Of one group, over what the layer holds, step by step."""
        new, steps = group.layers[index].prepare(new), group.steps_on(new.queries)
        if len(steps) == 1 and steps[0].positions.shape[1] == new.queries.shape[2]:
            return self._step(group, index, new, steps[0], params, alone=True)
        out = _nothing(new, params)
        for now in steps:
            part = self._step(group, index, new.columns(now.columns), now, params, alone=len(steps) == 1)
            out[:, :, now.columns] += part
        return out

    def _step(
        self, group: PolicyGroup, index: int, new: QKV, now: BatchStep, params: AttentionParams, alone: bool
    ) -> Tensor:
        """One step of the schedule: append, then attend and evict in the order it says."""
        layer, policy = group.layers[index], group.policy
        step = layer.append(new, now, params, alone, group.context())
        group.note_bytes(index)
        if policy.schedule.order == "attend_then_evict":
            out = attend(step, policy.needs)
            if self._shared.owned:
                self._shared.add(group, layer, step, new.values)
            self._evict(group, layer, step)
            return out
        self.evictions.add(group, layer, step)
        self._shared.add(group, layer, step, new.values)
        own = new.values if params.latents is None else params.latents.expand(new.keys, new.values)[1]
        return attend_to_survivors(step, own)

    def _evict(self, group: PolicyGroup, layer: LayerState, step: LayerStep) -> None:
        self.evictions.add(group, layer, step, later=bool(self._shared.owned) and self._shared.holds_up(layer, step))


def _nothing(new: QKV, params: AttentionParams) -> Tensor:
    """The attention output of queries that see nothing: 0."""
    dim = new.values.shape[-1] if params.latents is None else params.latents.value_dim
    return new.values.new_zeros(*new.queries.shape[:3], dim)


def _cost(group: PolicyGroup) -> tuple[bool, bool]:
    """Whose attention serves all variants best: it sums weights up on its way, over keys as the model made them."""
    policy = group.policy
    return policy.granularity == "query_head", policy.needs.sums is None
