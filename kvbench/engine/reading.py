"""Teacher-forced examples: which are scored, by which policy, in which blocks."""

from __future__ import annotations

from kvbench.engine.teacher_forcing import check_blocks, in_blocks
from kvbench.models.prompts import Prompt
from kvbench.policies.policy import Policy
from kvbench.policies.schedule import Blocks


def is_read(prompt: Prompt) -> bool:
    """Whether an example's tokens are given and scored, so that nothing is generated."""
    return prompt.target is not None or prompt.example.reading is not None


def is_generated(prompt: Prompt) -> bool:
    """Whether the model writes an answer; it reads or rates what it is given otherwise."""
    return not is_read(prompt) and not prompt.pairs


def reads_whole(prompt: Prompt) -> bool:
    """Whether all tokens but the first are scored, while the policy evicts block by block."""
    reading = prompt.example.reading
    return prompt.target is None and reading is not None and reading.prompt_tokens is None


def policy_for(policy: Policy, prompt: Prompt) -> Policy:
    """The policy as it reads one example: in the blocks its task asks for.

    Raises ValueError where it cannot evict that way, or would evict nothing while tokens are scored.
    """
    block = None if prompt.example.reading is None else prompt.example.reading.block
    if block is not None and policy.evicts:
        try:
            policy = in_blocks(policy, block)
        except ValueError as error:
            instead = " and score what follows a prompt (prompt_tokens)" if reads_whole(prompt) else ""
            raise ValueError(f"block={block}: {error}; leave block out (null){instead}") from error
    if reads_whole(prompt):
        check_blocks(policy)
    return policy


def label(policy: Policy) -> str:
    """What tables say behind a policy that reads whole texts: nothing is decoded, but the size of its blocks counts."""
    if not policy.evicts:
        return ""
    assert isinstance(policy.schedule, Blocks), "policy_for lets no other read a whole text"
    return f"m={policy.schedule.size:g}"
