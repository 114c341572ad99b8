"""Reading a prompt for all of its rows: once where policies only compress what was read, block by block side by side.

Shapes: R rows, T prompt tokens, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import chain

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.cache import KVCache
from kvbench.cache.join import together
from kvbench.cache.rotary import beyond, forget_lengths, uniform_length
from kvbench.engine.sequence import LiveSequence, take_next
from kvbench.inference.context import ContextCache, check_context, take_question
from kvbench.inference.generate import next_logits
from kvbench.inference.prompt_filter import filtered
from kvbench.inference.surprisal import telling_surprisal

TOKENS_AT_ONCE = 8192  # prompt tokens in one call, over all rows that read their blocks side by side


def read_prompt(model: PreTrainedModel, questions: Sequence[Sequence[LiveSequence]]) -> None:
    """Take a prompt in and choose the token after it, for the rows of every question about it (one: it has none).

    The rows of all questions have the same policies in the same order. One that fails has its error afterwards. Those
    of a first question may have read some blocks already (`kvbench.engine.prefill_examples`).
    """
    forget_lengths(model)
    alike = uniform_length(model.config.get_text_config(decoder=True))
    for some in _readings(questions[0], alike):
        places = [index for index, row in enumerate(questions[0]) if row in some]
        _read(model, [[asked[index] for index in places] for asked in questions])


def _readings(rows: Sequence[LiveSequence], alike: int | None) -> Iterator[list[LiveSequence]]:
    """The rows that can read the prompt together: whole, or block by block, as many as a call may hold."""
    total = rows[0].request.prompt.shape[1]
    whole, blocks, alone = [], dict[tuple[int, bool], list[LiveSequence]](), []
    for row in rows:
        schedule = row.policy.schedule
        size = schedule.call_size(total)
        if row.policy.filter is not None or row.policy.needs.surprisal:
            alone.append(row)
        elif size < total and not beyond(alike, total):
            blocks.setdefault((size, row.cache is None), []).append(row)
        elif schedule.order == "attend_then_evict" and len(schedule.steps(0, total, total)) == 1:
            whole.append(row)
        else:
            alone.append(row)
    yield from ([row] for row in alone)
    for (size, _), some in blocks.items():
        at_once = max(1, TOKENS_AT_ONCE // size)
        yield from (some[i : i + at_once] for i in range(0, len(some), at_once))
    if whole:
        yield whole


def _read(model: PreTrainedModel, questions: Sequence[Sequence[LiveSequence]]) -> None:
    """Take the prompt in for the rows of the first question, hand it to those of the others, and let all ask."""
    first, *others = questions
    try:
        ids = _open(model, first)
        opened = [row for row in first if row.cache is not None]
        logits = _prefill(model, opened, ids) if opened else ids
        for asked in others:
            for row, read in zip(asked, first, strict=True):
                row.cache, row.error = None if read.cache is None else read.cache.fork(), read.error
    except Exception as error:  # the model's own, the memory's: it ends these rows and no others
        for row in chain(*questions):
            row.error = row.error or error
        return
    for asked in questions:
        _ask(model, [row for row in asked if row.cache is not None], logits, len(opened) * len(questions))


def _ask(model: PreTrainedModel, rows: Sequence[LiveSequence], logits: Tensor, sharing: int) -> None:
    """Let a question follow and choose the token after it; logits [1 or R,V] are those after the prompt."""
    if not rows:
        return
    try:
        logits = _follow(model, rows, logits)
    except Exception as error:
        for row in rows:
            row.error = row.error or error
        return
    for row in rows:
        assert row.cache is not None
        row.sharing, row.position, row.error = max(row.sharing, sharing), row.cache.seen, row.cache.group.error
    take_next(rows, logits)


def _open(model: PreTrainedModel, rows: Sequence[LiveSequence]) -> Tensor:
    """A cache for each row, and the prompt [1,T] as they read it."""
    ids, context = rows[0].request.prompt, rows[0].request.context_tokens
    for row in (row for row in rows if row.cache is None):
        try:
            policy = row.policy
            if context is not None:
                check_context(policy)
            if policy.filter is not None:
                ids, policy = filtered(model, ids, policy)
            kind = KVCache if context is None else ContextCache
            row.cache = kind(model.config, policy, prompt_length=ids.shape[1])
            row.cache.group.isolated = True
        except ValueError as error:
            row.error = error
    return ids


def _prefill(model: PreTrainedModel, rows: Sequence[LiveSequence], ids: Tensor) -> Tensor:
    """The logits after the prompt [1,T]: [1,V] where all rows read it whole, a row each where they read blocks."""
    caches = [row.cache for row in rows if row.cache is not None]
    total = ids.shape[1]
    policy = caches[0].policy
    size = (
        total
        if beyond(uniform_length(model.config.get_text_config(decoder=True)), total)
        else policy.schedule.call_size(total)
    )
    batch = 1 if size >= total else len(rows)
    begin = caches[0].seen
    return take_in(model, caches, ids[:, begin:].expand(batch, -1), begin, size, share=batch == 1)


def take_in(
    model: PreTrainedModel, caches: Sequence[KVCache], ids: Tensor, begin: int, size: int, share: bool = False
) -> Tensor:
    """Let caches read prompt tokens [R,T], the first at `begin`, so many in a call; the logits after the last, [R,V].

    share: they all read one row, [1,T] (`together`).
    """
    cache = together(caches, share)
    logits = None
    for block in ids.split(size, dim=1):
        places = torch.arange(begin, begin + block.shape[1]).expand_as(block)
        begin += block.shape[1]
        rated = caches[0].policy.needs.surprisal
        with telling_surprisal(model, cache, ids, None) if rated else nullcontext():
            logits = next_logits(model, block, None, places, cache)
    assert logits is not None
    return logits


def _follow(model: PreTrainedModel, rows: Sequence[LiveSequence], logits: Tensor) -> Tensor:
    """Let the question follow, if there is one: the logits after it [R,V], from those after the context [1 or R,V].

    Rows take it in as one batch; where one has to take token by token, the others need not.
    """
    request = rows[0].request
    question = request.input_ids[:, request.prompt.shape[1] :]
    for row in rows:
        assert row.cache is not None
        row.cache.expect(question.shape[1] + request.max_new_tokens - 1)  # the last one is never stored
    if question.shape[1] == 0:
        return logits
    logits = logits.expand(len(rows), -1).clone()
    for exact in {row.policy.store.exact for row in rows}:
        some = [index for index, row in enumerate(rows) if row.policy.store.exact == exact]
        cache = together([cache for index in some if (cache := rows[index].cache) is not None])
        asked, at_once = question.expand(len(some), -1), max(1, TOKENS_AT_ONCE // len(some))
        logits[some] = take_question(model, cache, asked, logits[some], at_once)
    return logits
