"""Generation under a policy for one or more prompts: prefill, then decoding steps of a batch.

Shapes: B batch, T prompt tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.copies import together
from kvbench.engine.batch import DecodeBatch
from kvbench.engine.sequence import LiveSequence, Request, TokenSampler, script_of
from kvbench.errors import counted
from kvbench.models.devices import now
from kvbench.models.replay import check_graph
from kvbench.policies.policy import Policy


class HeldCache(Protocol):
    """What a sample shows of a cache: its sizes, counted from its tensors. `KVCache` has these members.

    seen: tokens seen. sequences: the sequences of a `KVCache`; empty for a cache of another package.
    """

    @property
    def seen(self) -> int: ...
    @property
    def sequences(self) -> Sequence[Any]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def held_nbytes(self) -> int: ...
    @property
    def peak_nbytes(self) -> int: ...
    @property
    def spare_nbytes(self) -> int: ...
    @property
    def state_nbytes(self) -> int: ...

    def kept_by_layer(self) -> list[Tensor]:
        """[B,H_kv] tokens held by each attention layer, on the CPU."""

    def kept_tokens(self) -> Tensor:
        """[L,B,H_kv] tokens held. ValueError if layers differ in their number of KV heads."""

    def footprint(self, decode_steps: int) -> float:
        """Entries held by its only sequence, summed over all fed tokens (`kvbench.cache.footprint`)."""


@dataclass(frozen=True)
class Generation:
    """The new tokens of each sequence of a batch (without EOS), the cache at the end, and the time.

    Policies of other packages (`Policy.generator`) return it for one request. fields: further fields of the sample.
    prefill_seconds: until the first token is known, including evictions of the prompt and a question after a context.
    decode_seconds: of all later tokens, in decode_steps calls of the model.
    """

    tokens: list[list[int]]
    cache: HeldCache
    prefill_seconds: float
    decode_seconds: float
    decode_steps: int
    fields: dict[str, Any] = field(default_factory=dict)


def generate_tokens(
    model: PreTrainedModel,
    input_ids: Tensor,
    policy: Policy,
    *,
    max_new_tokens: int,
    attention_mask: Tensor | None = None,
    cuda_graph: bool = False,
    eos_token_ids: Sequence[int] = (),
    question: int | Sequence[int] | None = None,
    samplers: Sequence[TokenSampler] = (),
    examples: Sequence[tuple[int, int]] = (),
    context_tokens: int | None = None,
    **request: Any,  # noqa: ANN401 - fields of Request
) -> Generation:
    """Generate for prompts input_ids [B,T], left-padded where attention_mask [B,T] is 0.

    Each row is a sequence with its own cache: its tokens do not depend on the other rows. It ends at an EOS id, when
    `stop` is true for its new tokens, or after max_new_tokens. cuda_graph: decoding steps are recorded and replayed.
    question: position of the question in the prompt, one number or one per row. samplers: one per row; (): greedy
    decoding. examples: `Request.example` of each row; (): none. context_tokens: length of the context that is
    compressed before its question. request: other fields of `Request`.

    Raises BudgetError if a cache holds more than its policy allows, FloatingPointError if logits are not numbers,
    and ValueError for an empty prompt, for padding on the right, and if steps cannot be recorded or a context cannot be
    compressed alone.
    """
    rows = len(input_ids)
    mask = padding(input_ids, attention_mask)
    if context_tokens is not None and mask is not None:
        raise ValueError("compress=context needs prompts without padding, whose contexts have one length")
    questions = question if isinstance(question, Sequence) else [question] * rows
    if len(questions) != rows:
        raise ValueError(
            f"question has {counted(len(questions), 'position')}, but the batch has {counted(rows, 'sequence')}"
        )
    requests = [
        Request(
            script_of(ids if mask is None else ids[:, mask[row]], context_tokens),
            max_new_tokens,
            eos_token_ids=tuple(eos_token_ids),
            question=questions[row],
            sampler=partial(samplers.__getitem__, row) if samplers else None,
            example=examples[row] if examples else None,
            **request,
        )
        for row, ids in enumerate(input_ids.split(1))
    ]
    return generate(model, requests, policy, cuda_graph)


@torch.inference_mode()
def generate(
    model: PreTrainedModel, requests: Sequence[Request], policy: Policy, cuda_graph: bool = False
) -> Generation:
    """Generate for requests under one policy as one batch; see `generate_tokens`."""
    if policy.generator is not None:
        if len(requests) != 1:
            raise ValueError(f"{policy.name} compresses one sequence at a time, got {len(requests)}")
        module, _, name = policy.generator.rpartition(".")
        found: Generation = getattr(import_module(module), name)(model, requests[0], policy)
        return found
    if cuda_graph:
        check_graph(policy, model.device)
    batch, sequences, prefill_seconds, decode_seconds = DecodeBatch(model, cuda_graph), list[LiveSequence](), 0.0, 0.0
    for some in [requests] if batch.can_admit(*requests) else [[request] for request in requests]:
        began = now(model)
        sequences += chain(*batch.admit(some, [policy]))
        prefilled = now(model)
        batch.finish(sequences)
        prefill_seconds += prefilled - began
        decode_seconds += now(model) - prefilled
    caches = [sequence.cache for sequence in sequences if sequence.cache is not None]
    cache = caches[0] if len(caches) == 1 else together(caches)
    steps = max(sequence.decode_steps for sequence in sequences)
    return Generation([one.tokens for one in sequences], cache, prefill_seconds, decode_seconds, steps)


def padding(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor | None:
    """A mask of the real tokens, bool [B,T]; None without padding. Raises ValueError for padding on the right."""
    if attention_mask is None or bool(attention_mask.all()):
        return None
    mask = attention_mask.to(torch.bool)
    if not bool(mask[:, -1].all()) or bool((mask[:, :-1] & ~mask[:, 1:]).any()):
        raise ValueError(
            "attention_mask must mark padding on the left only, so that every prompt ends in the last column"
        )
    return mask
