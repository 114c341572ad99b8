"""The decode batch: all sequences in flight, whatever their policy, budget, length or example, step together.

Every sequence gives what `generate_tokens` gives for it alone: the same tokens, kept positions, bytes and audit.

Where steps are recorded as a CUDA graph, a sequence that ended leaves a copy of its cache and stays in the batch as a
rider: it is fed on, and nobody looks at it. Riders go when the others need no more than a smaller `bucket`, when a
store has to grow and when sequences are admitted; so 32 sequences that end one by one are recorded 7 times, not 32.

Shapes: S sequences, T prompt tokens, V vocabulary.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.cache import BudgetError, KVCache, ScoreError
from kvbench.cache.device_batch import DeviceBatch
from kvbench.cache.group import in_order
from kvbench.cache.join import copied, empty_like, join, pick
from kvbench.cache.layout import continues
from kvbench.cache.rotary import beyond, uniform_length
from kvbench.engine.cuda_graph import Recorder, bucket, recorded
from kvbench.engine.prefill import prefill_examples, prefill_prompt
from kvbench.engine.prompt_pass import next_logits, padding
from kvbench.engine.sequence import LiveSequence, Request, choose_next, new_sequence
from kvbench.kernels.tiles import use_triton
from kvbench.policies.policy import Policy

Prefill = Callable[[PreTrainedModel, Sequence[Sequence[LiveSequence]]], None]
SETTLING = 3  # steps after a prompt until its layers look like those of sequences that decode already


class DecodeBatch:
    """The sequences in flight on one model; with riders (those that are done) the sequences of one cache in this order.

    cuda_graph: steps are replayed from a recording, until sequences come or many are gone. strict: see `Recorder`.
    """

    def __init__(self, model: PreTrainedModel, cuda_graph: bool = False, strict: bool = True) -> None:
        self._model = model
        self._recorder = Recorder(model, strict) if cuda_graph else None
        self._alike = uniform_length(model.config.get_text_config(decoder=True))
        self.cache: KVCache | None = None
        self.sequences: list[LiveSequence] = []
        self._settling = 0

    @property
    def in_flight(self) -> int:
        """Sequences being decoded."""
        return sum(not sequence.done for sequence in self.sequences)

    @property
    def nbytes(self) -> int:
        """Bytes they and the riders hold, which go as soon as others are admitted."""
        return 0 if self.cache is None else self.cache.nbytes

    def can_admit(self, request: Request) -> bool:
        """Whether the request may join those in flight.

        A model that rotates keys by the length each call reaches (longrope, dynamic NTK) takes requests beyond the
        length up to which all are rotated alike one after the other: else one sequence would be rotated by another's.
        """
        here = [sequence.request for sequence in self.sequences if not sequence.done]
        return not here or not any(map(self._stretches, [request, *here]))

    def _stretches(self, request: Request) -> bool:
        return beyond(self._alike, request.input_ids.shape[1] + request.max_new_tokens)

    # --- prompts ---------------------------------------------------------------------------------------------------
    def admit(self, request: Request, policies: Sequence[Policy]) -> list[LiveSequence]:
        """Prefill a prompt for all of its policies and choose their first tokens; sequences in the policies' order.

        One that fails (its budget, its numbers, the memory) comes back with its error and ends no other.
        """
        return self.admit_questions([request], policies)[0]

    def admit_questions(self, requests: Sequence[Request], policies: Sequence[Policy]) -> list[list[LiveSequence]]:
        """The same for questions about one context, or samples of one prompt (`joins`): one prefill; by request."""
        assert all(self.joins(requests[0], request) for request in requests[1:])
        return self._admitted(requests, policies, prefill_prompt)

    def admit_examples(self, requests: Sequence[Request], policies: Sequence[Policy]) -> list[list[LiveSequence]]:
        """The same for several prompts (`stands_beside`), whose blocks are read side by side where they can be."""
        assert all(self.stands_beside(requests[0], request) for request in requests[1:])
        return self._admitted(requests, policies, prefill_examples)

    @torch.inference_mode()
    def _admitted(
        self, requests: Sequence[Request], policies: Sequence[Policy], prefill: Prefill
    ) -> list[list[LiveSequence]]:
        assert all(map(self.can_admit, requests))
        for request in requests:
            padding(request.input_ids, None)
        self.drop(())
        sequences = [[new_sequence(request, policy) for policy in policies] for request in requests]
        prefill(self._model, sequences)
        self.start(chain(*sequences))
        return sequences

    def start(self, sequences: Iterable[LiveSequence]) -> None:
        """Sequences whose prompts are in begin to decode."""
        for sequence in sequences:
            if sequence.done:
                _close(sequence)
                continue
            assert sequence.cache is not None
            if self.cache is None:
                self.cache = empty_like(sequence.cache)
            self.cache.groups += sequence.cache.groups
            self.sequences.append(sequence)
        self._settling = SETTLING

    def stands_beside(self, first: Request, second: Request) -> bool:
        """Whether two prompts may be read side by side: all of both is prompt, and rotated alike."""
        alone = any(one.turns or one.context_tokens is not None for one in (first, second))
        return not alone and continues(self._model.config) and not any(map(self._stretches, (first, second)))

    def joins(self, first: Request, second: Request) -> bool:
        """Whether two requests have the same prompt, a context say, so that one reading serves both.

        Or whether the second goes on with the conversation of the first.
        """
        if first.turns:
            read = first.input_ids.shape[1]
            goes_on = second.turns[: len(first.turns)] == first.turns
            return goes_on and torch.equal(second.input_ids[:, :read], first.input_ids) and not self._stretches(second)
        if second.turns or first.context_tokens != second.context_tokens:
            return False
        return torch.equal(first.prompt, second.prompt) and not any(map(self._stretches, (first, second)))

    # --- tokens after them -----------------------------------------------------------------------------------------
    @torch.inference_mode()
    def step(self) -> list[LiveSequence]:
        """Feed every sequence its token and choose the next: one call of the model. Returns what ended."""
        batch = self._recorded()
        if batch is None or batch.room == 0:
            self.drop(())
        assert self.cache is not None, "no sequence is in flight"
        if self._settling:
            self._settling -= 1
            self._join(self.cache)
        elif use_triton(self.sequences[0].request.input_ids):
            self.cache.on_device()
        sequences = self.sequences
        live = {place: sequence for place, sequence in enumerate(sequences) if not sequence.done}
        device = sequences[0].request.input_ids.device
        tokens = torch.tensor([[sequence.tokens[-1]] for sequence in sequences], device=device)
        places = torch.tensor([[sequence.position] for sequence in sequences], device=device)
        self._prepare(self.cache, tokens, places)
        try:
            if self._recorder is None or self._settling:
                logits = next_logits(self._model, tokens, None, places, self.cache)
            else:
                logits = self._recorder.step(self.cache, tokens, places)
        except Exception as error:
            for sequence in live.values():
                sequence.error = error
            return self._finish(live)
        self._note_errors(self.cache)
        for sequence in live.values():
            sequence.position += 1
            sequence.decode_steps += 1
        choose_next(list(live.values()), logits if len(live) == len(sequences) else logits[list(live)])
        return self._finish(live)

    def _join(self, cache: KVCache) -> None:
        """Bring sequences that look alike together."""
        before = self.sequences
        self.sequences = [before[place] for place in join(cache)]
        for sequence in before:
            if sequence.cache is not None and sequence.cache.group not in cache.groups:
                sequence.cache = None

    def _prepare(self, cache: KVCache, tokens: Tensor, places: Tensor) -> None:
        """What groups need to know of the tokens [S,1] at places [S,1] to come."""
        for group, here in in_order(cache.groups):
            sequences = self.sequences[here]
            apart = len({sequence.position for sequence in sequences}) > 1
            group.progress.clock = places[here] if apart else None  # where the sequences of a group stand anywhere
            if group.policy.rates:
                logits = torch.cat([sequence.logits for sequence in sequences if sequence.logits is not None])
                group.rate_next(logits, tokens[here])

    def _note_errors(self, cache: KVCache) -> None:
        """Groups that failed: their sequences know why. Where only some of them did wrong, the others go on."""
        for group, here in in_order(cache.groups):
            error, sequences = group.error, self.sequences[here]
            if error is None:
                continue
            if isinstance(error, ScoreError):
                group.error, wrong = None, [sequences[index] for index in error.sequences]
            elif isinstance(error, BudgetError):
                first, group.error = here.start or 0, None
                wrong = [sequence for index, sequence in enumerate(sequences) if _breaks(cache, first + index)]
            else:
                wrong = sequences
            for sequence in wrong or sequences:
                sequence.error = error

    def drop(self, sequences: Collection[LiveSequence]) -> None:
        """Let go of sequences in flight that nobody waits for any more, they are decoded no further; and of riders."""
        unwanted = [sequence.done or sequence in sequences for sequence in self.sequences]
        self._keep([place for place, goes in enumerate(unwanted) if not goes])

    def _finish(self, live: Mapping[int, LiveSequence]) -> list[LiveSequence]:
        """Those of the live sequences, by place, that ended leave or ride, each with a cache of its own."""
        assert self.cache is not None
        ended = {place: sequence for place, sequence in live.items() if sequence.done}
        if not ended:
            return []
        rides = self._ride(ended)
        for place, sequence in ended.items():
            sequence.cache = copied(self.cache, place) if rides else pick(self.cache, [place])
        if not rides:
            self.drop(())
        for sequence in ended.values():
            _close(sequence)
        return list(ended.values())

    def _ride(self, ended: Mapping[int, LiveSequence]) -> bool:
        """Let sequences that ended ride along, unless those that go on need no more than a smaller bucket."""
        batch = self._recorded()
        if batch is None or bucket(self.in_flight) < len(self.sequences) or any(one.error for one in ended.values()):
            return False
        for place in ended:
            batch.halt(place)
        return batch.room > 0

    def _recorded(self) -> DeviceBatch | None:
        """The batch whose steps are recorded, if they are."""
        return None if self._recorder is None or self.cache is None else recorded(self.cache)

    def _keep(self, places: Sequence[int]) -> None:
        """Only the sequences at these places go on."""
        if self.cache is not None and len(places) < len(self.sequences):
            self.cache = pick(self.cache, places) if places else None
            self.sequences = [self.sequences[place] for place in places]


def _breaks(cache: KVCache, place: int) -> bool:
    """Whether a sequence by itself breaks its promise."""
    try:
        pick(cache, [place]).audit()
    except BudgetError:
        return True
    return False


def _close(sequence: LiveSequence) -> None:
    """The last look at a sequence: its promise."""
    if sequence.error is None and sequence.cache is not None:
        try:
            sequence.cache.audit()
        except BudgetError as error:
            sequence.error = error
