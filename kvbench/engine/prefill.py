"""Prefill: a prompt, and the question or the further prompts that follow it, for all of its sequences.

Policies that evict after the prompt share one call of the model. Policies that evict in blocks of one size are the
sequences of one batch.

Shapes: B batch, S sequences, T prompt tokens, M tokens after it, V vocabulary.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.cache import KVCache
from kvbench.cache.copies import fork, together
from kvbench.cache.families import layout_of, reset_rotation
from kvbench.engine.logits import GIVEN_TOKENS, append_given, fitting, next_logits
from kvbench.engine.pre_pass import open_cache, pre_pass
from kvbench.engine.recorder import CALL_TOKENS, Recorder
from kvbench.engine.scores import MostKept, Scores, joined, score
from kvbench.engine.sequence import LiveSequence, Played, Request, choose_next
from kvbench.models.devices import now
from kvbench.policies.allocators.allocator import JointAllocator, StatisticAllocator
from kvbench.policies.policy import Policy
from kvbench.policies.pre_passes.pre_pass import BlockPasses, PromptChoice, TextEncoder
from kvbench.run.run import check_context

Sequences = Sequence[LiveSequence]
Part = list[Sequences]
"""Columns of sequences that prefill one prompt together; a column has one policy, and a sequence for each question."""


# --- calls of the model ----------------------------------------------------------------------------------------------
def prefill(
    model: PreTrainedModel,
    ids: Tensor,
    cache: KVCache,
    encoder: TextEncoder | None = None,
    size: int | None = None,
) -> Tensor:
    """Append prompts ids [B,T] in calls of `size` tokens; returns the logits after the last token, [B,V].

    size: None: the best size for the cache's policy. encoder: tokenizer for pre-passes that contain text.
    """
    begin = cache.seen
    if not begin:
        reset_rotation(model)
    for block in ids.split(size or call_size(model, cache.policy, begin, ids.shape[1]), dim=1):
        positions = torch.arange(begin, begin + block.shape[1], device=ids.device).expand_as(block)
        begin += block.shape[1]
        with pre_pass(model, cache, ids, encoder):
            logits = next_logits(model, block, positions, cache)
    return logits


def call_size(model: PreTrainedModel, policy: Policy, begin: int, total: int) -> int:
    """Tokens per call of a prompt of `total` tokens that begins at position `begin`."""
    if begin and not layout_of(model.config).continues:
        return 1  # a call of several tokens would reset the recurrent layers
    return total if layout_of(model.config).needs_one_call(begin + total) else policy.schedule.call_size(total)


# --- scripts of new sequences ----------------------------------------------------------------------------------------
def prefill_prompts(model: PreTrainedModel, rows: Sequence[Sequences], recorder: Recorder | None = None) -> None:
    """Feed the scripts of sequences, and choose the token after each; rows: the sequences of every request.

    All rows have the same policies in the same order, except for the seeds of random numbers. Neighbours with the same
    prompt or context share its prefill. Blocks of several prompts are rows of one call. A sequence that fails has its
    error afterwards.
    """
    new = [[sequence for sequence in row if sequence.played is None] for row in rows]
    for sequence in (sequence for sequence in chain(*rows) if sequence.played is not None):
        _play(model, [sequence], None, 1)
    blocks: dict[int, list[Part]] = {}
    for part in chain(*(_parts(model, questions) for questions in _by_prompt(new))):
        policies, total = [column[0].policy for column in part], part[0][0].request.prompt.shape[1]
        if all(blocks_join(model, policy, total) for policy in policies):
            blocks.setdefault(policies[0].schedule.call_size(total), []).append(part)
        else:
            _prefill_parts(model, [part], None, None)
    for size, parts in blocks.items():
        while parts:
            fit = max(1, sum(count * size <= CALL_TOKENS for count in accumulate(map(len, parts))))
            _prefill_parts(model, parts[:fit], size, recorder)
            del parts[:fit]


def blocks_join(model: PreTrainedModel, policy: Policy, tokens: int) -> bool:
    """Whether blocks of a prompt of this many tokens can be rows of a call with those of other prompts."""
    return policy.pre_pass is None and call_size(model, policy, 0, tokens) < tokens


def _by_prompt(rows: Sequence[Sequences]) -> list[list[Sequences]]:
    """The rows, grouped by prompt or context: neighbours with the same one, which are no turns."""
    found: list[list[Sequences]] = []
    for row in filter(None, rows):
        if found and _same_prompt(found[-1][0][0].request, row[0].request):
            found[-1].append(row)
        else:
            found.append([row])
    return found


def _same_prompt(one: Request, other: Request) -> bool:
    if one.is_turn or other.is_turn or one.asks("question") != other.asks("question"):
        return False
    return torch.equal(one.prompt, other.prompt)


def _parts(model: PreTrainedModel, questions: Sequence[Sequences]) -> Iterator[Part]:
    """The sequences of one prompt, in parts that prefill together: as a whole, or in blocks of one size."""
    total, found = questions[0][0].request.prompt.shape[1], dict[int, Part]()
    for column in zip(*questions, strict=True):
        size = _shared_size(model, column[0], total)
        if any(one.policy != column[0].policy for one in column):  # random numbers of several answers to one prompt
            for one in column:
                yield [[one]]
        elif size is None:
            yield [column]
        else:
            found.setdefault(size, []).append(column)
    for size, columns in found.items():
        at_once = len(columns) if size >= total else max(1, CALL_TOKENS // size)
        yield from (columns[i : i + at_once] for i in range(0, len(columns), at_once))


def _shared_size(model: PreTrainedModel, sequence: LiveSequence, total: int) -> int | None:
    """Tokens of the calls that a sequence shares with others of its prompt; None: it prefills by itself."""
    schedule = sequence.policy.schedule
    size = schedule.call_size(total)
    if isinstance(sequence.policy.pre_pass, PromptChoice | BlockPasses):
        return None
    if size < total and not layout_of(model.config).needs_one_call(total):
        return size
    one_step = schedule.order == "attend_then_evict" and len(schedule.steps(0, total, total)) == 1
    return total if one_step else None


def _prefill_parts(model: PreTrainedModel, parts: Sequence[Part], size: int | None, recorder: Recorder | None) -> None:
    """Prefill for the first sequence of every column, copy its cache for the others, and feed what follows.

    size: of the blocks, if each call has a block of every part that has a whole one left; None: the only part prefills
    by itself.
    """
    try:
        ids = [_open(model, [first for first, *_ in part]) for part in parts]
        opened = [[first.cache for first, *_ in part if first.cache is not None] for part in parts]
        if size is None:
            logits = [_prefill_alone(model, ids[0], opened[0], parts[0][0][0].request.encoder)]
        else:
            logits = _block_calls(model, ids, opened, size, recorder)
        for first, *others in chain(*parts):
            for sequence in others:
                sequence.cache = None if first.cache is None else fork(first.cache)
                sequence.error = first.error
    except Exception as error:  # of the model or the memory: it ends these sequences and no others
        _fail(chain(*chain(*parts)), error)
        return
    sharing = sum(len(caches) * len(part[0]) for caches, part in zip(opened, parts, strict=True))
    for part, out in zip(parts, logits, strict=True):
        for question in zip(*part, strict=True):
            _play(model, [sequence for sequence in question if sequence.cache is not None], out, sharing)


def _prefill_alone(
    model: PreTrainedModel, ids: Tensor, caches: Sequence[KVCache], encoder: TextEncoder | None
) -> Tensor:
    """The logits after a prompt [1,T] for some caches: [1,V] if all share one call, [S,V] if they prefill in blocks."""
    if not caches:
        return ids
    size = call_size(model, caches[0].policy, 0, ids.shape[1])
    if size >= ids.shape[1]:
        return prefill(model, ids, together(caches, one_prompt=len(caches) > 1), encoder, size)
    return prefill(model, ids.expand(len(caches), -1), together(caches), encoder, size)


def _block_calls(
    model: PreTrainedModel,
    ids: Sequence[Tensor],
    caches: Sequence[Sequence[KVCache]],
    size: int,
    recorder: Recorder | None,
) -> list[Tensor]:
    """The logits [S,V] after each prompt ids [1,T], for its caches; no logits for a prompt without a cache."""
    found = [prompt.new_zeros(0, 0, dtype=torch.float32) for prompt in ids]
    begin, rows, cache = 0, list[int](), None
    left = [index for index, some in enumerate(caches) if some]
    reset_rotation(model)
    while left:
        new = size
        if begin == 0 and recorder is not None:
            cache, rows = together(list(chain(*(caches[index] for index in left)))), left
            new = recorder.first_call(cache, size, min(ids[index].shape[1] for index in left))
        whole = [index for index in left if ids[index].shape[1] - begin >= new]
        for index in left:
            if index not in whole:  # the end of a prompt, shorter than a block
                rest = ids[index][:, begin:].expand(len(caches[index]), -1)
                found[index] = prefill(model, rest, together(caches[index]), size=size)
        if whole and whole != rows:
            cache, rows = together(list(chain(*(caches[index] for index in whole)))), whole
        if whole:
            assert cache is not None
            block = torch.cat([ids[i][:, begin : begin + new].expand(len(caches[i]), -1) for i in whole])
            positions = torch.arange(begin, begin + new, device=block.device).expand_as(block)
            if recorder is None:
                logits = next_logits(model, block, positions, cache)
            else:
                last = any(ids[index].shape[1] == begin + new for index in whole)
                logits = recorder(block, positions, cache, last).clone()
            for index, out in zip(whole, logits.split([len(caches[index]) for index in whole]), strict=True):
                found[index] = out
        begin += new
        left = [index for index in whole if ids[index].shape[1] > begin]
    return found


def _fail(sequences: Iterable[LiveSequence], error: Exception) -> None:
    for sequence in sequences:
        sequence.error = sequence.error or error


def _open(model: PreTrainedModel, sequences: Sequences) -> Tensor:
    """Create the cache of each sequence; returns the tokens [1,T] that they prefill."""
    request = sequences[0].request
    ids, asks = request.prompt, request.asks("question")
    for sequence in sequences:
        try:
            if asks:
                check_context(sequence.policy)
            ids, sequence.cache = open_cache(model, request.prompt, sequence.policy, request.question)
            held = sequence.cache.sequence
            held.watchers = copy.deepcopy([*request.watch])
            held.isolated, held.takes_several = True, held.takes_several or asks
        except ValueError as error:
            sequence.error = error
    return ids


def _play(model: PreTrainedModel, sequences: Sequences, logits: Tensor | None, sharing: int) -> None:
    """Feed the rest of the script, and choose the next token; logits [1 or S,V] after what is in the caches.

    Turns of a conversation come one sequence at a time, because their caches may continue from different answers.
    """
    if not sequences:
        return
    request, last = sequences[0].request, sequences[0].request.script[-1]
    if request.is_turn and len(sequences) > 1:
        assert logits is not None
        for one, row in zip(sequences, logits.expand(len(sequences), -1).split(1), strict=True):
            _play(model, [one], row, sharing)
        return
    try:
        if request.is_turn:
            logits = _next_prompts(model, sequences[0], logits)
        assert logits is not None, "a turn has a prompt of its own"
        if last.kind == "scored":
            _score(model, sequences, last.tokens, logits)
        else:
            question = last.tokens if last.kind == "question" else last.tokens[:, :0]
            logits = _append_question(model, sequences, question, logits)
    except Exception as error:
        _fail(sequences, error)
        return
    for sequence in sequences:
        sequence.sharing = sharing
        sequence.position, sequence.error = sequence.held.columns, sequence.error or sequence.held.error
    if last.kind != "scored":
        choose_next(sequences, logits)


def _next_prompts(model: PreTrainedModel, sequence: LiveSequence, logits: Tensor | None) -> Tensor | None:
    """Append the prompts of a conversation that are not in its cache yet; the logits [1,V] after the last one."""
    request, cache = sequence.request, sequence.cache
    if sequence.played is None:
        assert cache is not None
        sequence.played = Played(cache)
    played, sequence.played = sequence.played, None
    sequence.cache, pending = played.cache, played.pending
    for feed in request.script[played.feeds :]:
        prompt = torch.cat([feed.tokens.new_tensor([pending]), feed.tokens], dim=1) if pending else feed.tokens
        played.cache.next_prompt(prompt.shape[1])
        logits, pending = prefill(model, prompt, played.cache, request.encoder), ()
    if request.next_turn == "golden":
        sequence.played = Played(fork(played.cache), len(request.script))
    return logits


def _append_question(model: PreTrainedModel, sequences: Sequences, question: Tensor, logits: Tensor) -> Tensor:
    """Append a question [1,M] after a context: the logits after it [S,V]; of an empty one those given, [1 or S,V]."""
    request = sequences[0].request
    for sequence in sequences if request.next_turn != "own" else ():
        assert sequence.cache is not None
        sequence.cache.expect(question.shape[1] + request.max_new_tokens - 1)  # the last token is never stored
    if question.shape[1] == 0:
        return logits
    logits = logits.expand(len(sequences), -1).clone()
    for some, out in _append_to_all(model, sequences, question, logits, CALL_TOKENS, keep=1):
        logits[some] = out[:, -1]
    return logits


def _score(model: PreTrainedModel, sequences: Sequences, target: Tensor, logits: Tensor) -> None:
    """Score the tokens [1,M] after a prompt under each sequence; logits [1 or S,V] before the first of them."""
    began, fed, caches = now(model), target[:, :-1], [one.cache for one in sequences if one.cache is not None]
    logits = logits.expand(len(sequences), -1)
    scored = [[score(row, target[0, :1])] for row in logits.split(1)]
    for cache in caches:
        cache.expect(fed.shape[1])
    most = list(map(MostKept, caches))
    report = sequences[0].request.report or (lambda tokens: None)
    report(len(sequences) * sequences[0].request.length)
    for some, out in _append_to_all(model, sequences, fed, logits, fitting(model)) if fed.shape[1] else ():
        report(out.shape[0] * out.shape[1])
        for index, rows in zip(some, out, strict=True):
            done = sum(len(logprobs) for logprobs, _ in scored[index])
            scored[index].append(score(rows, target[0, done : done + len(rows)]))
    seconds = now(model) - began
    for sequence, cache, kept, parts in zip(sequences, caches, most, scored, strict=True):
        try:
            sequence.scores, sequence.complete = Scores(*joined(parts), cache, kept, seconds), True
        except FloatingPointError as error:
            sequence.error = error


def _append_to_all(
    model: PreTrainedModel, sequences: Sequences, tokens: Tensor, logits: Tensor, at_once: int, keep: int = 0
) -> Iterator[tuple[list[int], Tensor]]:
    """Append given tokens [1,M] to every sequence: the logits [s,n,V] of each call, and the s sequences that are in it.

    logits [S,V]: before the first token. at_once: the most tokens of one call. keep: as for `append_given`. Tokens come
    one by one if each must be rated before it is appended, if a store compresses or all layers evict together between
    two, if the model would rotate all of a call by the length of the last token, or if it would reset its recurrent
    layers.
    """
    groups: dict[bool, list[int]] = {}
    for index, sequence in enumerate(sequences):
        policy = sequence.policy
        single = policy.rates or not policy.store.exact or _evicts_jointly(policy)
        groups.setdefault(single, []).append(index)
    for single, some in groups.items():
        cache = together([cache for index in some if (cache := sequences[index].cache) is not None])
        single = single or layout_of(model.config).needs_one_call(cache.seen + tokens.shape[1])
        size = 1 if single else min(GIVEN_TOKENS, max(1, at_once // len(some)))
        for out in append_given(model, cache, tokens.expand(len(some), -1), size, logits[some], keep):
            yield some, out


def _evicts_jointly(policy: Policy) -> bool:
    """Whether an eviction after a decoded token waits for the scores of all layers."""
    allocator, schedule = policy.allocator, policy.schedule
    if isinstance(allocator, JointAllocator) and not allocator.per_head and schedule.decoding_evicts:
        return True
    return schedule.late and isinstance(allocator, JointAllocator | StatisticAllocator)
