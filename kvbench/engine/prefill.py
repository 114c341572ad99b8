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
from kvbench.engine.given import append_given, given_singly, given_size
from kvbench.engine.logits import next_logits
from kvbench.engine.pre_pass import open_cache, pre_pass
from kvbench.engine.recorder import CALL_TOKENS, Recorder
from kvbench.engine.scores import Scores, WatchedCache, fitting, joined, score
from kvbench.engine.sequence import LiveSequence, Played, choose_next
from kvbench.models.devices import now
from kvbench.policies.policy import Policy
from kvbench.policies.pre_passes.pre_pass import BlockPasses, PromptChoice, TextEncoder
from kvbench.run.run import check_context

Sequences = Sequence[LiveSequence]


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


# --- prompts, each for the sequences of all questions about it -------------------------------------------------------
def prefill_prompts(
    model: PreTrainedModel, prompts: Sequence[Sequence[Sequences]], recorder: Recorder | None = None
) -> None:
    """Prefill prompts and choose the token after each, for the sequences of every question about it.

    The sequences of all questions have the same policies in the same order, except for the seeds of random numbers.
    Blocks of several prompts are rows of one call. A sequence that fails has its error afterwards.
    """
    blocks: dict[int, list[Sequence[Sequences]]] = {}
    for questions in prompts:
        new = [[sequence for sequence in some if sequence.played is None] for some in questions]
        for sequence in (sequence for sequence in chain(*questions) if sequence.played is not None):
            _play(model, [sequence], None, 1)
        for part in _parts(model, new):
            if all(blocks_join(model, one.policy, _length(one)) for one in part[0]):
                blocks.setdefault(_block(part[0][0]), []).append(part)
            else:
                _prefill_questions(model, part)
    for size, parts in blocks.items():
        while parts:
            rows = list(accumulate(len(part[0]) for part in parts))
            fit = max(1, sum(count * size <= CALL_TOKENS for count in rows))
            _prefill_blocks(model, parts[:fit], size, recorder)
            del parts[:fit]


def blocks_join(model: PreTrainedModel, policy: Policy, tokens: int) -> bool:
    """Whether blocks of a prompt of this many tokens can be rows of a call with those of other prompts."""
    return policy.pre_pass is None and call_size(model, policy, 0, tokens) < tokens


def _parts(model: PreTrainedModel, questions: Sequence[Sequences]) -> Iterator[Sequence[Sequences]]:
    """The sequences of a prompt that can prefill together, for every question."""
    shared: dict[LiveSequence, Sequences] = {}
    for sequences in zip(*questions, strict=True):
        if all(sequence.policy == sequences[0].policy for sequence in sequences[1:]):
            shared[sequences[0]] = sequences
        else:  # a policy with random numbers, for several answers to one prompt
            yield from ([[sequence]] for sequence in sequences)
    for batch in _batches(model, list(shared)):
        yield list(zip(*(shared[first] for first in batch), strict=True))


def _batches(model: PreTrainedModel, sequences: Sequences) -> Iterator[list[LiveSequence]]:
    """Sequences that can prefill one prompt together: as a whole, or in blocks up to the tokens of a call."""
    total = _length(sequences[0]) if sequences else 0
    whole, blocks = [], dict[int, list[LiveSequence]]()
    for sequence in sequences:
        schedule, size = sequence.policy.schedule, _block(sequence)
        if isinstance(sequence.policy.pre_pass, PromptChoice | BlockPasses):
            yield [sequence]
        elif size < total and not layout_of(model.config).needs_one_call(total):
            blocks.setdefault(size, []).append(sequence)
        elif schedule.order == "attend_then_evict" and len(schedule.steps(0, total, total)) == 1:
            whole.append(sequence)
        else:
            yield [sequence]
    for size, some in blocks.items():
        at_once = max(1, CALL_TOKENS // size)
        yield from (some[i : i + at_once] for i in range(0, len(some), at_once))
    if whole:
        yield whole


def _prefill_questions(model: PreTrainedModel, questions: Sequence[Sequences]) -> None:
    """Prefill for the sequences of the first question, copy their caches for the others, and append the questions."""
    try:
        logits, opened = _prefill(model, questions[0])
    except Exception as error:  # of the model or the memory: it ends these sequences and no others
        _fail(chain(*questions), error)
        return
    _ask(model, questions, logits, len(opened) * len(questions))


def _ask(model: PreTrainedModel, questions: Sequence[Sequences], logits: Tensor, sharing: int) -> None:
    """Copy the caches of the first question's sequences for the others, and append the questions."""
    first, *others = questions
    try:
        for question in others:
            for sequence, source in zip(question, first, strict=True):
                sequence.cache = None if source.cache is None else fork(source.cache)
                sequence.error = source.error
    except Exception as error:
        _fail(chain(*questions), error)
        return
    for question in questions:
        _play(model, [sequence for sequence in question if sequence.cache is not None], logits, sharing)


def _prefill_blocks(
    model: PreTrainedModel, prompts: Sequence[Sequence[Sequences]], size: int, recorder: Recorder | None
) -> None:
    """Prefill prompts in blocks of one size: each call has a block of every prompt that has a whole one left."""
    try:
        ids = [_open(model, questions[0]) for questions in prompts]
        opened = [[one.cache for one in questions[0] if one.cache is not None] for questions in prompts]
        logits = _block_calls(model, ids, opened, size, recorder)
    except Exception as error:
        _fail(chain(*chain(*prompts)), error)
        return
    sharing = sum(len(caches) * len(questions) for caches, questions in zip(opened, prompts, strict=True))
    for questions, out in zip(prompts, logits, strict=True):
        _ask(model, questions, out, sharing)


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


def _prefill(model: PreTrainedModel, sequences: Sequences) -> tuple[Tensor, list[LiveSequence]]:
    """Create the caches of sequences and prefill their prompt; also the sequences whose caches could be created.

    The logits after the prompt: [1,V] if all sequences share one call, [S,V] if they prefill in blocks.
    """
    ids = _open(model, sequences)
    opened = [sequence for sequence in sequences if sequence.cache is not None]
    caches = [sequence.cache for sequence in opened if sequence.cache is not None]
    if not caches:
        return ids, []
    size = call_size(model, caches[0].policy, 0, ids.shape[1])
    whole = size >= ids.shape[1]
    cache = together(caches, whole and len(caches) > 1)
    prompts = ids.expand(1 if whole else len(caches), -1)
    return prefill(model, prompts, cache, sequences[0].request.encoder, size), opened


def _open(model: PreTrainedModel, sequences: Sequences) -> Tensor:
    """Create the cache of each sequence; returns the tokens [1,T] that they prefill."""
    request = sequences[0].request
    ids, asks = request.prompt, request.asks("question")
    for sequence in sequences:
        try:
            if asks:
                check_context(sequence.policy)
            kind = WatchedCache if request.asks("scored") else KVCache
            ids, sequence.cache = open_cache(model, request.prompt, sequence.policy, kind, request.question)
            held = sequence.cache.sequence
            held.watchers = copy.deepcopy([*request.watch])
            held.isolated, held.takes_several = True, held.takes_several or asks
        except ValueError as error:
            sequence.error = error
    return ids


def _play(model: PreTrainedModel, sequences: Sequences, logits: Tensor | None, sharing: int) -> None:
    """Feed the rest of the script, and choose the next token; logits [1 or S,V] after what is in the caches.

    Further prompts come one sequence at a time, because their caches may continue from different answers.
    """
    if not sequences or not sequences[0].request.is_turn:
        _end_script(model, sequences, logits, sharing)
        return
    for index, sequence in enumerate(sequences):
        own = None if logits is None else logits[index % len(logits)][None]
        try:
            own = _next_prompts(model, sequence, own)
        except Exception as error:
            sequence.error = sequence.error or error
        else:
            _end_script(model, [sequence], own, sharing)


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


def _end_script(model: PreTrainedModel, sequences: Sequences, logits: Tensor | None, sharing: int) -> None:
    """After the prompts, append a question or score tokens, and choose the next token; logits [1 or S,V]."""
    if not sequences:
        return
    request = sequences[0].request
    last = request.script[-1]
    try:
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
    began, fed = now(model), target[:, :-1]
    logits = logits.expand(len(sequences), -1)
    scored = [[score(row, target[0, :1])] for row in logits.split(1)]
    done = [1] * len(sequences)
    for sequence in sequences:
        assert isinstance(sequence.cache, WatchedCache)
        sequence.cache.expect(fed.shape[1])
        sequence.cache.watch()
    report = sequences[0].request.report or (lambda tokens: None)
    report(len(sequences) * sequences[0].request.length)
    for some, out in _append_to_all(model, sequences, fed, logits, fitting(model)) if fed.shape[1] else ():
        report(out.shape[0] * out.shape[1])
        for index, rows in zip(some, out, strict=True):
            scored[index].append(score(rows, target[0, done[index] : done[index] + len(rows)]))
            done[index] += len(rows)
    seconds = now(model) - began
    for sequence, parts in zip(sequences, scored, strict=True):
        assert isinstance(sequence.cache, WatchedCache)
        try:
            sequence.scores, sequence.complete = Scores(*joined(parts), sequence.cache, seconds), True
        except FloatingPointError as error:
            sequence.error = error


def _append_to_all(
    model: PreTrainedModel, sequences: Sequences, tokens: Tensor, logits: Tensor, at_once: int, keep: int = 0
) -> Iterator[tuple[list[int], Tensor]]:
    """Append given tokens [1,M] to every sequence: the logits [s,n,V] of each call, and the s sequences that are in it.

    Sequences that need single tokens are one batch, all others another. logits [S,V]: before the first token. at_once:
    the most tokens of one call. keep: as for `append_given`.
    """
    singly = [given_singly(sequence.policy) for sequence in sequences]
    for kind in set(singly):
        some = [index for index, single in enumerate(singly) if single == kind]
        cache = together([cache for index in some if (cache := sequences[index].cache) is not None])
        policies = (one.policy for one in cache.sequences)
        size = min(given_size(model, policies, cache.seen + tokens.shape[1]), max(1, at_once // len(some)))
        for out in append_given(model, cache, tokens.expand(len(some), -1), size, logits[some], keep):
            yield some, out


def _length(sequence: LiveSequence) -> int:
    return sequence.request.prompt.shape[1]


def _block(sequence: LiveSequence) -> int:
    """Tokens per block of its prompt; the whole prompt if the policy does not evict in blocks."""
    return sequence.policy.schedule.call_size(_length(sequence))
