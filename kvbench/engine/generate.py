"""Generation through a policy's cache: every row of a batch is a sequence of the decode batch, audited at its end.

Shapes: B batch, T prompt columns (padding included).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.cache import KVCache
from kvbench.cache.join import together
from kvbench.cache.pressed import PressedCache
from kvbench.engine.batch import DecodeBatch
from kvbench.engine.press import generate_with_press
from kvbench.engine.prompt_pass import now, padding
from kvbench.engine.sampling import TokenSampler
from kvbench.engine.sequence import LiveSequence, Request
from kvbench.models.replay import can_replay, check_graph
from kvbench.policies.policy import Policy
from kvbench.policies.pre_passes.pre_pass import TextEncoder
from kvbench.policies.press import KVPress


@dataclass(frozen=True)
class Generation:
    """What came out of one batch: new tokens of each sequence (EOS left out), the cache as it ended, and seconds.

    prefill_seconds: until the first token is known, evictions of the prompt and a question after its context included.
    decode_seconds: all later tokens, in decode_steps calls of the model.
    """

    tokens: list[list[int]]
    cache: KVCache | PressedCache
    prefill_seconds: float
    decode_seconds: float
    decode_steps: int


@torch.inference_mode()
def generate_tokens(
    model: PreTrainedModel,
    input_ids: Tensor,
    policy: Policy,
    *,
    attention_mask: Tensor | None = None,
    max_new_tokens: int,
    eos_token_ids: Sequence[int] = (),
    stop: Callable[[list[int]], bool] | None = None,
    min_new_tokens: int = 0,
    cuda_graph: bool = False,
    context_tokens: int | None = None,
    question: int | Sequence[int] | None = None,
    encoder: TextEncoder | None = None,
    draws: Sequence[TokenSampler] = (),
    dictated: Sequence[int] = (),
) -> Generation:
    """Generate for input_ids [B,T] (left-padded where attention_mask [B,T] is 0) under a policy.

    Each row is a sequence of its own: its cache and its output are those of a batch of one. It ends at an EOS id, where
    `stop` says so of its new tokens, or after max_new_tokens. No EOS is among its first min_new_tokens tokens.
    cuda_graph: decoding steps are replayed from a recording. context_tokens: the policy's prompt is so long; what
    follows of input_ids is a question, appended as `take_question` does. question: where the question of a prompt that
    is compressed with it begins, one position or one per sequence, for policies that ask. encoder: for policies with a
    pre-pass that is made of text. draws: what each sequence draws its tokens by; (): greedily. dictated: the tokens
    with which every answer begins, among max_new_tokens and min_new_tokens.

    Raises BudgetError if the promise is broken, ValueError for an empty prompt or padding on the right, and where steps
    cannot be recorded or a context cannot be compressed by itself, FloatingPointError where the model's output is not a
    number.
    """
    mask = padding(input_ids, attention_mask)
    if context_tokens is not None and mask is not None:
        raise ValueError("compress=context takes prompts without padding, whose contexts are all of one length")
    questions = question if isinstance(question, Sequence) else [question] * len(input_ids)
    if len(questions) != len(input_ids):
        raise ValueError(f"question names {len(questions)} sequences, the model was called with {len(input_ids)}")
    requests = [
        Request(
            input_ids[row : row + 1] if mask is None else input_ids[row : row + 1, mask[row]],
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens,
            eos_token_ids=tuple(eos_token_ids),
            stop=stop,
            context_tokens=context_tokens,
            question=questions[row],
            encoder=encoder,
            draws=partial(draws.__getitem__, row) if draws else None,
            dictated=tuple(dictated),
        )
        for row in range(len(input_ids))
    ]
    if isinstance(policy, KVPress):
        if len(requests) != 1:
            raise ValueError(f"{policy.name} compresses one sequence at a time, got {len(requests)}")
        began = now(model)
        tokens, pressed, prefilled, steps = generate_with_press(model, requests[0], policy)
        return Generation([tokens], pressed, prefilled - began, now(model) - prefilled, steps)
    if cuda_graph:
        check_graph(policy, model.device)
        can_replay(model.config, required=True)
    batch, began = DecodeBatch(model, cuda_graph), now(model)
    sequences = admit(batch, requests, policy)
    prefilled = now(model)
    finish(batch, sequences)
    decoded = now(model)
    caches = [sequence.cache for sequence in sequences if sequence.cache is not None]
    cache = caches[0] if len(caches) == 1 else together(caches)
    steps = max(sequence.decode_steps for sequence in sequences)
    return Generation([s.tokens for s in sequences], cache, prefilled - began, decoded - prefilled, steps)


def admit(batch: DecodeBatch, requests: Sequence[Request], policy: Policy) -> list[LiveSequence]:
    """Prefill prompts for one policy: one prefill for equal prompts, side by side where their blocks can be."""
    first, others = requests[0], requests[1:]
    if others and all(batch.joins(first, other) for other in others):
        admitted = batch.admit_questions(requests, [policy])
    elif others and all(batch.stands_beside(first, other) for other in others):
        admitted = batch.admit_examples(requests, [policy])
    else:
        admitted = [batch.admit(request, [policy]) for request in requests]
    return [sequence for (sequence,) in admitted]


def finish(batch: DecodeBatch, sequences: Sequence[LiveSequence]) -> None:
    """Decode until every sequence ended. Raises the error of the first that failed."""
    while batch.in_flight and not any(sequence.error for sequence in sequences):
        batch.step()
    for sequence in sequences:
        if sequence.error is not None:
            raise sequence.error
