"""Prefill of a prompt for all of its sequences: once where policies evict after it, as a batch where in blocks.

Blocks of several examples are prefilled side by side: a block is a small call of the model, and what follows it, scores
and evictions of every layer, costs as much for one example as for several.

Shapes: S sequences, T prompt tokens, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.cache import KVCache
from kvbench.cache.join import fork, together
from kvbench.cache.layout import attention_layers, in_one_call
from kvbench.cache.rotary import forget_lengths
from kvbench.engine.context import ContextCache, take_question
from kvbench.engine.pre_pass import pre_pass, read_prompt
from kvbench.engine.prompt_pass import next_logits
from kvbench.engine.sequence import LiveSequence, choose_next
from kvbench.engine.turns import take_turns
from kvbench.policies.allocators.allocator import StatisticAllocator
from kvbench.policies.layer_budgets import layer_budgets
from kvbench.policies.policy import Policy
from kvbench.policies.pre_passes.pre_pass import BlockPasses, PromptChoice, TextEncoder
from kvbench.policies.stores.dense import Dense
from kvbench.run.run import check_context

TOKENS_AT_ONCE = 8192  # prompt tokens in one call, over all sequences that read their blocks side by side


def prefill_prompt(model: PreTrainedModel, questions: Sequence[Sequence[LiveSequence]]) -> None:
    """Prefill a prompt and choose the token after it, for the sequences of every question about it.

    The sequences of all questions have the same policies in the same order, but for the seeds of random numbers. One
    that fails has its error afterwards. Those of a first question may have some blocks already
    (`prefill_examples`).
    """
    forget_lengths(model)
    shared: list[tuple[LiveSequence, ...]] = []
    apart: list[tuple[LiveSequence, ...]] = []
    for sequences in zip(*questions, strict=True):
        same = all(sequence.policy == sequences[0].policy for sequence in sequences[1:])
        (shared if same else apart).append(sequences)
    for sequence in chain(*apart):  # a policy that draws random numbers, for several answers to one prompt
        _prefill_questions(model, [[sequence]])
    first = [sequences[0] for sequences in shared]
    for some in _prefilled_together(model, first):
        together_with = [sequences for sequences in shared if sequences[0] in some]
        _prefill_questions(model, [list(asked) for asked in zip(*together_with, strict=True)])


def _prefilled_together(model: PreTrainedModel, sequences: Sequence[LiveSequence]) -> Iterator[list[LiveSequence]]:
    """The sequences that can read the prompt together: whole, or block by block, as many as a call may hold."""
    total = sequences[0].request.prompt.shape[1]
    whole, blocks, alone = [], dict[tuple[int, bool], list[LiveSequence]](), []
    for sequence in sequences:
        schedule = sequence.policy.schedule
        size = schedule.call_size(total)
        if isinstance(sequence.policy.pre_pass, PromptChoice | BlockPasses):
            alone.append(sequence)
        elif size < total and not in_one_call(model.config, total):
            blocks.setdefault((size, sequence.cache is None), []).append(sequence)
        elif schedule.order == "attend_then_evict" and len(schedule.steps(0, total, total)) == 1:
            whole.append(sequence)
        else:
            alone.append(sequence)
    yield from ([sequence] for sequence in alone)
    for (size, _), some in blocks.items():
        at_once = max(1, TOKENS_AT_ONCE // size)
        yield from (some[i : i + at_once] for i in range(0, len(some), at_once))
    if whole:
        yield whole


def _prefill_questions(model: PreTrainedModel, questions: Sequence[Sequence[LiveSequence]]) -> None:
    """Take the prompt in for the sequences of the first question, hand it to those of the others, and let all ask."""
    first, *others = questions
    try:
        ids = _open(model, first)
        opened = [sequence for sequence in first if sequence.cache is not None]
        logits = _prefill(model, opened, ids) if opened else ids
        if first[0].request.turns:
            _converse(model, questions, logits, len(opened) * len(questions))
            return
        for asked in others:
            for sequence, read in zip(asked, first, strict=True):
                sequence.cache, sequence.error = None if read.cache is None else fork(read.cache), read.error
    except Exception as error:  # the model's own, the memory's: it ends these sequences and no others
        for sequence in chain(*questions):
            sequence.error = sequence.error or error
        return
    for asked in questions:
        _ask(
            model, [sequence for sequence in asked if sequence.cache is not None], logits, len(opened) * len(questions)
        )


def _converse(
    model: PreTrainedModel, questions: Sequence[Sequence[LiveSequence]], logits: Tensor, sharing: int
) -> None:
    """Let the later prompts of a conversation follow, each question's in a copy of the cache of the one before it.

    What is generated for a question is then in no other's cache. logits [1 or S,V] are those after the first prompt.
    """
    opened = [sequences for sequences in zip(*questions, strict=True) if sequences[0].cache is not None]
    for place, sequences in enumerate(opened):
        read, row, before = 1, logits[place % len(logits)][None], None
        for sequence in sequences:
            if before is not None:
                assert before.cache is not None
                sequence.cache, sequence.error = fork(before.cache), before.error
            prompts, cache = sequence.request.prompts, sequence.cache
            if cache is not None and sequence.error is None:
                try:
                    row = take_turns(model, cache, row, prompts[read:], sequence.request.encoder)
                except Exception as error:
                    sequence.error = error
            read, before, sequence.logits = len(prompts), sequence, row
    for sequences in zip(*questions, strict=True):
        for sequence in sequences:
            sequence.error = sequence.error or sequences[0].error
            if sequence.error is None and sequence.logits is not None:
                _ask(model, [sequence], sequence.logits, sharing)


def _ask(model: PreTrainedModel, sequences: Sequence[LiveSequence], logits: Tensor, sharing: int) -> None:
    """Let a question follow and choose the token after it; logits [1 or S,V] are those after the prompt."""
    if not sequences:
        return
    try:
        logits = _follow(model, sequences, logits)
    except Exception as error:
        for sequence in sequences:
            sequence.error = sequence.error or error
        return
    for sequence in sequences:
        assert sequence.cache is not None
        sequence.sharing, sequence.position, sequence.error = (
            max(sequence.sharing, sharing),
            sequence.cache.seen,
            sequence.cache.group.error,
        )
    choose_next(sequences, logits)


def _open(model: PreTrainedModel, sequences: Sequence[LiveSequence]) -> Tensor:
    """A cache for each sequence, and the prompt [1,T] as they read it."""
    request = sequences[0].request
    ids, context = request.prompt, request.context_tokens
    for sequence in (sequence for sequence in sequences if sequence.cache is None):
        try:
            if context is not None:
                check_context(sequence.policy)
            kind = KVCache if context is None else ContextCache
            ids, sequence.cache = read_prompt(model, ids, sequence.policy, kind, request.question)
            sequence.cache.group.isolated = True
        except ValueError as error:
            sequence.error = error
    return ids


def _prefill(model: PreTrainedModel, sequences: Sequence[LiveSequence], ids: Tensor) -> Tensor:
    """The logits after the prompt [1,T]: [1,V] where all read it whole, [S,V] where they read blocks."""
    caches = [sequence.cache for sequence in sequences if sequence.cache is not None]
    total = ids.shape[1]
    policy = caches[0].policy
    size = total if in_one_call(model.config, total) else policy.schedule.call_size(total)
    batch = 1 if size >= total else len(sequences)
    begin = caches[0].seen
    whole, encoder = batch == 1, sequences[0].request.encoder
    return prefill_blocks(model, caches, ids[:, begin:].expand(batch, -1), begin, size, whole, encoder)


def prefill_blocks(
    model: PreTrainedModel,
    caches: Sequence[KVCache],
    ids: Tensor,
    begin: int,
    size: int,
    share: bool = False,
    encoder: TextEncoder | None = None,
) -> Tensor:
    """Let caches read prompt tokens [S,T], the first at `begin`, so many in a call; the logits after the last, [S,V].

    share: they all read one sequence, [1,T] (`together`). encoder: for policies with a pre-pass that is made of text.
    """
    cache = together(caches, share and len(caches) > 1)  # what one cache alone reads may come in several steps
    logits = None
    for block in ids.split(size, dim=1):
        places = torch.arange(begin, begin + block.shape[1]).expand_as(block)
        begin += block.shape[1]
        with pre_pass(model, cache, ids, None, encoder):
            logits = next_logits(model, block, None, places, cache)
    assert logits is not None
    return logits


def _follow(model: PreTrainedModel, sequences: Sequence[LiveSequence], logits: Tensor) -> Tensor:
    """Let the question follow, if there is one: the logits after it [S,V], from those after the context [1 or S,V].

    Sequences take it in as one batch; where one has to take token by token, the others need not.
    """
    request = sequences[0].request
    question = request.later
    for sequence in sequences:
        assert sequence.cache is not None
        sequence.cache.expect(question.shape[1] + request.max_new_tokens - 1)  # the last one is never stored
    if question.shape[1] == 0:
        return logits
    logits = logits.expand(len(sequences), -1).clone()
    singly = [sequence.policy.rates or not sequence.policy.store.exact for sequence in sequences]
    for kind in set(singly):
        some = [index for index, single in enumerate(singly) if single == kind]
        cache = together([cache for index in some if (cache := sequences[index].cache) is not None])
        asked, at_once = question.expand(len(some), -1), max(1, TOKENS_AT_ONCE // len(some))
        logits[some] = take_question(model, cache, asked, logits[some], at_once)
    return logits


# --- several examples: their blocks side by side, as the sequences of one cache per variant --------------------------
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
    """Read all blocks but the last of each prompt, the examples of all variants as the sequences of one batch.

    A sequence then reads its last block with the other variants of its example. One that failed begins anew without the
    others.
    """
    prompts, lengths = [sequence.request.prompt for sequence in variants[0]], list(map(_length, variants[0]))
    ends = [(length - 1) // size * size for length in lengths]
    caches = [[KVCache(model.config, s.policy, prompt_length=_length(s)) for s in sequences] for sequences in variants]
    for cache in chain(*caches):
        cache.group.isolated = True
    start = 0
    for end in sorted(set(ends)):
        here = [index for index, last in enumerate(ends) if last >= end]
        try:
            parts = torch.cat([prompts[index][:, start:end] for index in here])
            together_with = [row[index] for row in caches for index in here]
            prefill_blocks(model, together_with, parts.repeat(len(caches), 1), start, size)
        except Exception:
            return
        for sequences, row in zip(variants, caches, strict=True):
            for index in here:
                if ends[index] == end and row[index].group.error is None:
                    sequences[index].cache = row[index]
                    sequences[index].sharing = len(variants) * len(prompts)
        start = end
