"""Reading the prompts of several examples: their blocks side by side, as the sequences of one cache per variant.

A block is a small call of the model, and what follows it, scores and evictions of every layer, costs as much for one
example as for several.

Shapes: T prompt tokens.
"""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from kvbench.cache.cache import KVCache
from kvbench.cache.join import pick
from kvbench.cache.layout import attention_layers
from kvbench.cache.rotary import forget_lengths
from kvbench.engine.prefill import TOKENS_AT_ONCE, prefill_blocks, prefill_prompt
from kvbench.engine.sequence import LiveSequence
from kvbench.policies.allocators.allocator import StatisticAllocator
from kvbench.policies.layer_budgets import layer_budgets
from kvbench.policies.policy import Policy
from kvbench.policies.stores.dense import Dense


def prefill_examples(model: PreTrainedModel, examples: Sequence[Sequence[LiveSequence]]) -> None:
    """Take the prompts of several examples in for the sequences of each, and choose the tokens after them.

    The sequences of all have the same policies in the same order. One that fails has its error afterwards.
    """
    forget_lengths(model)
    layers = attention_layers(model.config)
    sizes: dict[int, list[list[LiveSequence]]] = {}
    for variant in zip(*examples, strict=True):
        several = [sequence for sequence in variant if _block(sequence) < _length(sequence)]
        same = all(sequence.policy == several[0].policy for sequence in several[1:])
        if len(several) > 1 and same and _alike(several[0].policy, layers, list(map(_length, several))):
            sizes.setdefault(_block(several[0]), []).append(several)
    for size, some in sizes.items():
        at_once = max(1, TOKENS_AT_ONCE // (size * len(some[0])))
        for begin in range(0, len(some), at_once):
            _begin(model, some[begin : begin + at_once], size)
    for sequences in examples:
        prefill_prompt(model, [sequences])


def _length(sequence: LiveSequence) -> int:
    return sequence.request.prompt.shape[1]


def _block(sequence: LiveSequence) -> int:
    """Tokens that its policy has the prompt read by: all of them, where it does not evict in blocks."""
    return sequence.policy.schedule.call_size(_length(sequence))


def _alike(policy: Policy, layers: int, lengths: Sequence[int]) -> bool:
    """Whether prompts of these lengths, read in blocks, leave layers of one shape behind, block after block."""
    allocator = policy.allocator
    if policy.pre_pass is not None or policy.scorer is None or not isinstance(policy.store, Dense):
        return False
    if policy.needs.kept or policy.needs.question or isinstance(allocator, StatisticAllocator) or allocator.per_head:
        return False
    try:
        return len({tuple(layer_budgets(policy, layers, length)) for length in lengths}) == 1
    except ValueError:  # for one of them: it will say so when it reads by itself
        return False


def _begin(model: PreTrainedModel, variants: Sequence[Sequence[LiveSequence]], size: int) -> None:
    """Read all blocks but the last of each prompt, the examples of each variant as the sequences of one cache.

    A sequence leaves with a cache of its own, to read its last block with the other variants of its example. Those of a
    cache that failed get none: they begin anew, so that each fails for its own reason.
    """
    prompts, lengths = [sequence.request.prompt for sequence in variants[0]], list(map(_length, variants[0]))
    ends = [(length - 1) // size * size for length in lengths]
    caches = [KVCache(model.config, sequences[0].policy, prompt_length=lengths) for sequences in variants]
    for cache in caches:
        cache.group.isolated = True
    here, start = list(range(len(prompts))), 0
    while here:
        end = min(ends[index] for index in here)
        try:
            parts = torch.cat([prompts[index][:, start:end] for index in here])
            prefill_blocks(model, caches, parts.repeat(len(caches), 1), start, size)
        except Exception:
            return
        for place, index in enumerate(here):
            if ends[index] == end:
                for sequences, cache in zip(variants, caches, strict=True):
                    if cache.group.error is None:
                        sequences[index].cache = pick(cache, [place])
                        sequences[index].sharing = len(variants) * len(prompts)
        left = [place for place, index in enumerate(here) if ends[index] > end]
        if left and len(left) < len(here):
            caches = [cache if cache.group.error else pick(cache, left) for cache in caches]
        here, start = [here[place] for place in left], end
