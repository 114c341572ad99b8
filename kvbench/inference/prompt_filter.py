"""Running a prompt filter: the model's own layers up to the filter's, then the tokens it chose.

Shapes: T prompt tokens, H_q query heads, H_kv KV heads, M tokens of a call, D head dim.
"""

import dataclasses

from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.cache import KVCache
from kvbench.cache.step import Projected
from kvbench.policies.layer_budgets import total_slots
from kvbench.policies.observation import AttentionParams
from kvbench.policies.policy import Policy


class _Reached(Exception):  # noqa: N818 - a signal, not an error: the layers after the filter's need not run
    def __init__(self, queries: Tensor, keys: Tensor) -> None:
        super().__init__("the filter's layer was reached")
        self.queries = queries
        self.keys = keys


class _Probe(KVCache):
    """Hands out what the attention of layer `reached` would have read and ends the forward pass."""

    reached = 0

    def attend(self, index: int, new: Projected, mask: Tensor | None, how: AttentionParams) -> Tensor:
        if index == self.reached:
            raise _Reached(new.queries, new.keys)
        return super().attend(index, new, mask, how)


def filtered(model: PreTrainedModel, input_ids: Tensor, policy: Policy) -> tuple[Tensor, Policy]:
    """The prompt [1,T] as the policy's filter leaves it, [1,k], and the policy without its filter.

    ValueError if the model has no such layer or several sequences are given at once.
    """
    assert policy.filter is not None
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    if policy.filter.layer >= layers:
        raise ValueError(
            f"{policy.name} filters at layer {policy.filter.layer}, the model's layers are 0 to {layers - 1}"
        )
    if len(input_ids) != 1:
        raise ValueError(f"{policy.name} rewrites each prompt to its own, so it takes one sequence at a time")
    plain = dataclasses.replace(policy, filter=None)
    budget = total_slots(policy, 1, input_ids.shape[1])
    if input_ids.shape[1] <= budget:
        return input_ids, plain
    cache = _Probe(model.config, Policy(name="full"))
    cache.reached = policy.filter.layer
    try:
        model(input_ids=input_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    except _Reached as reached:
        kept = policy.filter.choose(reached.queries[0, :, -1], reached.keys[0], budget)
        return input_ids[:, kept.to(input_ids.device)], plain
    raise AssertionError("the filter's layer never ran")
