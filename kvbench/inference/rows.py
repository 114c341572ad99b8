"""Rows, one example under one policy each: a prompt is read once for all its policies, all rows decode as one batch.

Every row gives what `greedy` gives for it alone: the same tokens, kept positions, bytes and audit.

Shapes: R rows, T prompt tokens, V vocabulary.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.joining import joined, picked, shape_of
from kvbench.cache.kv_cache import BudgetError, KVCache, ScoreError
from kvbench.cache.rotary import beyond, uniform_length
from kvbench.cache.rows import RowsCache
from kvbench.inference.examples import read_examples
from kvbench.inference.generate import next_logits, padding
from kvbench.inference.reading import read_prompt
from kvbench.inference.row import Request, Row, row_of, take_next
from kvbench.inference.surprisal import surprisal
from kvbench.policies.policy import Policy

Reader = Callable[[PreTrainedModel, Sequence[Sequence[Row]]], None]
SETTLING = 3  # steps after a prompt until its layers look like those of rows that decode already


@dataclass(eq=False)
class Batch:
    """Rows whose sequences one cache holds, in this order."""

    cache: KVCache
    rows: list[Row]


class Rows:
    """The rows in flight on one model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._alike = uniform_length(model.config.get_text_config(decoder=True))
        self._batches: list[Batch] = []
        self._settling = 0

    @property
    def in_flight(self) -> int:
        """Rows being decoded."""
        return sum(len(batch.rows) for batch in self._batches)

    @property
    def nbytes(self) -> int:
        """Bytes their caches hold."""
        return sum(batch.cache.nbytes for batch in self._batches)

    def takes(self, request: Request) -> bool:
        """Whether the request may join those in flight.

        A model that rotates keys by the length each call reaches (longrope, dynamic NTK) takes requests beyond the
        length up to which all are rotated alike one after the other: else one row would be rotated by another's.
        """
        here = [row.request for batch in self._batches for row in batch.rows]
        return not here or not any(map(self._stretches, [request, *here]))

    def _stretches(self, request: Request) -> bool:
        return beyond(self._alike, request.input_ids.shape[1] + request.max_new_tokens)

    # --- prompts ---------------------------------------------------------------------------------------------------
    def admit(self, request: Request, policies: Sequence[Policy]) -> list[Row]:
        """Read a prompt for all of its policies and choose their first tokens; rows in the order of the policies.

        One that fails (its budget, its numbers, the memory) comes back with its error and ends no other.
        """
        return self.admit_questions([request], policies)[0]

    def admit_questions(self, requests: Sequence[Request], policies: Sequence[Policy]) -> list[list[Row]]:
        """The same for several questions about one context (`joins`), which is read once: the rows of each request."""
        assert all(self.joins(requests[0], request) for request in requests[1:])
        return self._admitted(requests, policies, read_prompt)

    def admit_examples(self, requests: Sequence[Request], policies: Sequence[Policy]) -> list[list[Row]]:
        """The same for several prompts (`stands_beside`), whose blocks are read side by side where they can be."""
        assert all(self.stands_beside(requests[0], request) for request in requests[1:])
        return self._admitted(requests, policies, read_examples)

    @torch.inference_mode()
    def _admitted(self, requests: Sequence[Request], policies: Sequence[Policy], read: Reader) -> list[list[Row]]:
        assert all(map(self.takes, requests))
        for request in requests:
            padding(request.input_ids, None)
        rows = [[row_of(request, policy) for policy in policies] for request in requests]
        read(self._model, rows)
        self._enter(chain(*rows))
        return rows

    def _enter(self, rows: Iterable[Row]) -> None:
        """Rows whose prompts are in begin to decode."""
        for row in rows:
            if row.done:
                _close(row)
            else:
                assert row.cache is not None
                self._batches.append(Batch(row.cache, [row]))
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
    def step(self) -> list[Row]:
        """Feed every row its token and choose the next: one call of the model. Returns the rows that ended."""
        if self._settling:
            self._settling -= 1
            batches, self._batches = self._batches, []
            self._batches = _joined(batches)
        rows = [row for batch in self._batches for row in batch.rows]
        device = rows[0].request.input_ids.device
        tokens = torch.tensor([[row.tokens[-1]] for row in rows], device=device)
        places = torch.tensor([[row.position] for row in rows], device=device)
        for row, token in zip(rows, tokens, strict=True):
            if row.logits is not None and row.cache is not None:
                row.cache.tell_surprisal(surprisal(row.logits[:, None], token[None]))
        try:
            logits = self._call(tokens, places)
        except Exception as error:
            for row in rows:
                row.error = error
            return self._leave()
        self._batches = [part for batch in self._batches for part in _without_failed(batch)]
        for row in rows:
            row.position += 1
            row.decode_steps += 1
        take_next(rows, logits)
        return self._leave()

    def _call(self, tokens: Tensor, places: Tensor) -> Tensor:
        """The logits [R,V] after tokens [R,1] at places [R,1]."""
        together = RowsCache(self._model.config)
        together.seat([batch.cache for batch in self._batches])
        clocks = places.split([len(batch.rows) for batch in self._batches])
        for batch, clock in zip(self._batches, clocks, strict=True):
            apart = len({row.position for row in batch.rows}) > 1
            batch.cache.progress.clock = clock if apart else None  # where the rows of one batch stand anywhere
        return next_logits(self._model, tokens, None, places, together)

    def drop(self, rows: Collection[Row]) -> None:
        """Let go of rows in flight that nobody waits for any more: they are decoded no further."""
        batches, self._batches = self._batches, []
        for batch in _taken(batches):
            left = _some(batch, [index for index, row in enumerate(batch.rows) if row not in rows])
            self._batches += [] if left is None else [left]

    def _leave(self) -> list[Row]:
        """Rows that ended leave their batches."""
        ended = [row for batch in self._batches for row in batch.rows if row.done]
        if ended:
            batches, self._batches = self._batches, []
            self._batches = [left for batch in _taken(batches) if (left := _left(batch)) is not None]
        for row in ended:
            _close(row)
        return ended


def _taken(batches: list[Batch]) -> Iterator[Batch]:
    """Each of them, out of the list: what is made of one takes its place in memory before the next one's is made."""
    while batches:
        yield batches.pop(0)


def _alike(batches: list[Batch]) -> list[list[Batch]]:
    """Those whose caches may be joined, side by side; takes them out of the list."""
    shapes: dict[Hashable, list[Batch]] = {}
    for batch in _taken(batches):
        shape = shape_of(batch.cache)
        shapes.setdefault(id(batch) if shape is None else shape, []).append(batch)
    return list(shapes.values())


def _joined(batches: list[Batch]) -> list[Batch]:
    """The same rows, in as few batches as their caches allow; takes them out of the list."""
    found, alike = [], _alike(batches)
    while alike:
        some = alike.pop(0)
        if len(some) > 1:
            cache, order = joined([batch.cache for batch in some])
            rows = [row for batch in some for row in batch.rows]
            some = [Batch(cache, [rows[place] for place in order])]
            for row in rows:
                row.cache = None
        found += some
    return found


def _without_failed(batch: Batch) -> list[Batch]:
    """A batch whose cache failed: its rows know why. Where only some of them did wrong, the others go on."""
    error = batch.cache.error
    if error is None:
        return [batch]
    if isinstance(error, ScoreError):
        batch.cache.error = None
        for index in error.sequences:
            batch.rows[index].error = error
        return [batch]
    if not isinstance(error, BudgetError) or len(batch.rows) == 1:
        for row in batch.rows:
            row.error = error
        return [batch]
    alone = [Batch(picked(batch.cache, [index]), [row]) for index, row in enumerate(batch.rows)]
    for one in alone:
        (row,) = one.rows
        row.cache = one.cache
        _close(row)
    return alone


def _left(batch: Batch) -> Batch | None:
    """What is left of a batch once the rows that ended have taken their sequences with them; None if nothing is."""
    going_on = [index for index, row in enumerate(batch.rows) if not row.done]
    for index, row in enumerate(batch.rows):
        if row.done:
            row.cache = batch.cache if len(batch.rows) == 1 else picked(batch.cache, [index])
    return _some(batch, going_on)


def _some(batch: Batch, places: Sequence[int]) -> Batch | None:
    """The rows of a batch at these places, in a cache of their own; None if there are none."""
    if not places:
        return None
    if len(places) == len(batch.rows):
        return batch
    some = Batch(picked(batch.cache, places), [batch.rows[place] for place in places])
    if len(places) == 1:
        some.rows[0].cache = some.cache
    return some


def _close(row: Row) -> None:
    """The last look at a row: its promise."""
    if row.error is None and row.cache is not None:
        try:
            row.cache.audit()
        except BudgetError as error:
            row.error = error
