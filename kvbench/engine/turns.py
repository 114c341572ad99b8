"""Conversations: prompts that follow each other in one cache, each brought to the budget at its end.

Shapes: T prompt tokens of a turn, S sequences, V vocabulary.
"""

from collections.abc import Iterable

from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.cache import KVCache
from kvbench.engine.prompt_pass import prefill
from kvbench.policies.policy import Policy
from kvbench.policies.policy_checks import check_next_prompt
from kvbench.policies.pre_passes.pre_pass import PromptChoice, TextEncoder
from kvbench.policies.press import KVPress


def check_turns(policy: Policy) -> None:
    """ValueError where a policy cannot bring another prompt, after a first one, to its budget."""
    if isinstance(policy, KVPress):
        raise ValueError(f"{policy.name} is a press of kvpress, which compresses a single prompt: use mode=scdq")
    if isinstance(policy.pre_pass, PromptChoice):
        raise ValueError(f"{policy.name} rewrites a prompt before it is read, so none can follow it: use mode=scdq")
    if policy.schedule.late:
        raise ValueError(
            f"{policy.name} evicts only once a token after a prompt has attended to all of it (late=true), and in a "
            "conversation the next prompt follows: use another schedule or policy"
        )
    if policy.evicts:
        check_next_prompt(policy.name, policy.store, policy.allocator)


def take_turns(
    model: PreTrainedModel, cache: KVCache, logits: Tensor, prompts: Iterable[Tensor], encoder: TextEncoder | None
) -> Tensor:
    """Let later prompts [1,T] follow in a cache; logits [1,V] after the last, those given where there is none."""
    for ids in prompts:
        cache.next_prompt(ids.shape[1])
        logits = prefill(model, ids, None, cache, encoder)
    return logits
