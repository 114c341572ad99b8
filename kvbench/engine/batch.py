"""Rows, one example under one policy each: a prompt is read once for all its policies, all rows decode as one batch.

Every row gives what `greedy` gives for it alone: the same tokens, kept positions, bytes and audit.

Shapes: R rows, T prompt tokens, V vocabulary.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.cache import BudgetError, KVCache, ScoreError
from kvbench.cache.join import join, pick
from kvbench.cache.rotary import beyond, uniform_length
from kvbench.engine.prefill import read_prompt
from kvbench.engine.prefill_examples import read_examples
from kvbench.engine.sequence import LiveSequence, Request, new_sequence, take_next
from kvbench.inference.generate import next_logits, padding
from kvbench.inference.surprisal import surprisal
from kvbench.policies.policy import Policy

Reader = Callable[[PreTrainedModel, Sequence[Sequence[LiveSequence]]], None]
SETTLING = 3  # steps after a prompt until its layers look like those of rows that decode already


class DecodeBatch:
    """The rows in flight on one model, the sequences of one cache in this order."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._alike = uniform_length(model.config.get_text_config(decoder=True))
        self.cache: KVCache | None = None
        self.rows: list[LiveSequence] = []
        self._settling = 0

    @property
    def in_flight(self) -> int:
        """Rows being decoded."""
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes they hold."""
        return 0 if self.cache is None else self.cache.nbytes

    def takes(self, request: Request) -> bool:
        """Whether the request may join those in flight.

        A model that rotates keys by the length each call reaches (longrope, dynamic NTK) takes requests beyond the
        length up to which all are rotated alike one after the other: else one row would be rotated by another's.
        """
        here = [row.request for row in self.rows]
        return not here or not any(map(self._stretches, [request, *here]))

    def _stretches(self, request: Request) -> bool:
        return beyond(self._alike, request.input_ids.shape[1] + request.max_new_tokens)

    # --- prompts ---------------------------------------------------------------------------------------------------
    def admit(self, request: Request, policies: Sequence[Policy]) -> list[LiveSequence]:
        """Read a prompt for all of its policies and choose their first tokens; rows in the order of the policies.

        One that fails (its budget, its numbers, the memory) comes back with its error and ends no other.
        """
        return self.admit_questions([request], policies)[0]

    def admit_questions(self, requests: Sequence[Request], policies: Sequence[Policy]) -> list[list[LiveSequence]]:
        """The same for several questions about one context (`joins`), which is read once: the rows of each request."""
        assert all(self.joins(requests[0], request) for request in requests[1:])
        return self._admitted(requests, policies, read_prompt)

    def admit_examples(self, requests: Sequence[Request], policies: Sequence[Policy]) -> list[list[LiveSequence]]:
        """The same for several prompts (`stands_beside`), whose blocks are read side by side where they can be."""
        assert all(self.stands_beside(requests[0], request) for request in requests[1:])
        return self._admitted(requests, policies, read_examples)

    @torch.inference_mode()
    def _admitted(
        self, requests: Sequence[Request], policies: Sequence[Policy], read: Reader
    ) -> list[list[LiveSequence]]:
        assert all(map(self.takes, requests))
        for request in requests:
            padding(request.input_ids, None)
        rows = [[new_sequence(request, policy) for policy in policies] for request in requests]
        read(self._model, rows)
        self._enter(chain(*rows))
        return rows

    def _enter(self, rows: Iterable[LiveSequence]) -> None:
        """Rows whose prompts are in begin to decode."""
        for row in rows:
            if row.done:
                _close(row)
                continue
            assert row.cache is not None
            if self.cache is None:
                self.cache = row.cache.without_groups()
            self.cache.groups += row.cache.groups
            self.rows.append(row)
        self._settling = SETTLING

    def stands_beside(self, first: Request, second: Request) -> bool:
        """Whether two prompts may be read side by side: all of both is prompt, and rotated alike."""
        whole = first.context_tokens is None and second.context_tokens is None
        return whole and not any(map(self._stretches, (first, second)))

    def joins(self, first: Request, second: Request) -> bool:
        """Whether two requests ask about the same context, so that one reading of it serves both."""
        if first.context_tokens is None or first.context_tokens != second.context_tokens:
            return False
        return torch.equal(first.prompt, second.prompt) and not any(map(self._stretches, (first, second)))

    # --- tokens after them -----------------------------------------------------------------------------------------
    @torch.inference_mode()
    def step(self) -> list[LiveSequence]:
        """Feed every row its token and choose the next: one call of the model. Returns the rows that ended."""
        assert self.cache is not None, "no row is in flight"
        if self._settling:
            self._settling -= 1
            self._join(self.cache)
        rows = self.rows
        device = rows[0].request.input_ids.device
        tokens = torch.tensor([[row.tokens[-1]] for row in rows], device=device)
        places = torch.tensor([[row.position] for row in rows], device=device)
        self._tell(self.cache, tokens, places)
        try:
            logits = next_logits(self._model, tokens, None, places, self.cache)
        except Exception as error:
            for row in rows:
                row.error = error
            return self._leave()
        self._note_errors(self.cache)
        for row in rows:
            row.position += 1
            row.decode_steps += 1
        take_next(rows, logits)
        return self._leave()

    def _join(self, cache: KVCache) -> None:
        """Bring sequences that look alike together."""
        before = self.rows
        self.rows = [before[place] for place in join(cache)]
        for row in before:
            if row.cache is not None and row.cache.group not in cache.groups:
                row.cache = None

    def _tell(self, cache: KVCache, tokens: Tensor, places: Tensor) -> None:
        """What groups need to know of the tokens [R,1] at places [R,1] to come."""
        for group, here in cache.rows():
            rows = self.rows[here]
            apart = len({row.position for row in rows}) > 1
            group.progress.clock = places[here] if apart else None  # where the sequences of a group stand anywhere
            if group.policy.needs.surprisal:
                logits = torch.cat([row.logits for row in rows if row.logits is not None])
                group.tell_surprisal(surprisal(logits[:, None], tokens[here]))

    def _note_errors(self, cache: KVCache) -> None:
        """Groups that failed: their rows know why. Where only some of them did wrong, the others go on."""
        for group, here in cache.rows():
            error, rows = group.error, self.rows[here]
            if error is None:
                continue
            if isinstance(error, ScoreError):
                group.error, wrong = None, [rows[index] for index in error.sequences]
            elif isinstance(error, BudgetError):
                first, group.error = here.start or 0, None
                wrong = [row for index, row in enumerate(rows) if _breaks(cache, first + index)]
            else:
                wrong = rows
            for row in wrong or rows:
                row.error = error

    def drop(self, rows: Collection[LiveSequence]) -> None:
        """Let go of rows in flight that nobody waits for any more: they are decoded no further."""
        self._keep([index for index, row in enumerate(self.rows) if row not in rows])

    def _leave(self) -> list[LiveSequence]:
        """Rows that ended leave, each with a cache of its own."""
        assert self.cache is not None
        ended = [row for row in self.rows if row.done]
        for index, row in enumerate(self.rows):
            if row.done:
                row.cache = pick(self.cache, [index])
        self._keep([index for index, row in enumerate(self.rows) if not row.done])
        for row in ended:
            _close(row)
        return ended

    def _keep(self, places: Sequence[int]) -> None:
        """Only the rows at these places go on."""
        if self.cache is not None and len(places) < len(self.rows):
            self.cache = pick(self.cache, places) if places else None
            self.rows = [self.rows[place] for place in places]


def _breaks(cache: KVCache, place: int) -> bool:
    """Whether a sequence by itself breaks its promise."""
    try:
        pick(cache, [place]).audit()
    except BudgetError:
        return True
    return False


def _close(row: LiveSequence) -> None:
    """The last look at a row: its promise."""
    if row.error is None and row.cache is not None:
        try:
            row.cache.audit()
        except BudgetError as error:
            row.error = error
