"""The scheduler: admits sequences while memory allows, decodes them as one batch, and delivers their samples.

Runs that cannot share a batch are computed by `one_by_one`. Both write all runs of an example together.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice, takewhile

from kvbench.engine import device
from kvbench.engine.answers import (
    FAILURES,
    OUT_OF_MEMORY,
    OWN_ERRORS,
    Completion,
    answered,
    as_memory_error,
    conversation,
    failed,
    message,
    request_for,
    run_alone,
)
from kvbench.engine.batch import DecodeBatch
from kvbench.engine.device import now
from kvbench.engine.generate import Conversation
from kvbench.engine.memory import MemoryPlanner
from kvbench.engine.run_writer import RunWriter
from kvbench.engine.sequence import LiveSequence, Request
from kvbench.models.loading import LoadedModel
from kvbench.models.prompts import Prompt
from kvbench.results.samples import Sample
from kvbench.results.session import Totals
from kvbench.terminal.command import Advance

MAX_WAIT = 30.0
"""Seconds that the oldest sequence may wait for prefills of others: about the time lost if the process is killed."""

log = logging.getLogger(__name__)


class BatchError(RuntimeError):
    """An error of a whole batch that cannot be assigned to one of its sequences."""


@dataclass(frozen=True)
class WorkItem:
    """One example and the runs that need it."""

    index: int
    prompt: Prompt
    runs: tuple[RunWriter, ...]

    @property
    def conversation(self) -> int:
        """A number that all turns of a conversation share: the example of its first turn."""
        return self.index // self.runs[0].run.samples - max(0, len(self.prompt.turns) - 1)

    @property
    def missing(self) -> list[RunWriter]:
        """The runs for which it is still to be computed."""
        return [run for run in self.runs if not run.ended and not run.has(self.index)]


def work_items(runs: Sequence[RunWriter]) -> list[WorkItem]:
    """Every example that one of the runs needs, in order. The runs have equal prompts, up to their limits."""
    longest = max((run.prompts for run in runs), key=len, default=())
    missing = [(run, set(run.missing)) for run in runs]
    needing = (tuple(run for run, indices in missing if index in indices) for index in range(len(longest)))
    return [WorkItem(i, prompt, some) for i, (prompt, some) in enumerate(zip(longest, needing, strict=True)) if some]


class OrderedWriter:
    """Writes an example once all of its runs have it, so that the runs of a killed sweep have the same examples."""

    def __init__(self, items: Sequence[WorkItem]) -> None:
        self._open = deque(items)

    def write(self) -> None:
        """Write every example that is complete after complete ones; runs that are computed alone are not waited for."""
        while self._open and all(run.run_alone for run in self._open[0].missing):
            item = self._open.popleft()
            for run in item.runs:
                run.write(before=item.index + 1)


@dataclass
class _Waiting:
    """An example and the runs for which it is not admitted yet."""

    prompt: Prompt
    runs: list[RunWriter]
    request: Request | None = None

    @property
    def live(self) -> list[RunWriter]:
        """The runs that still need it from the batch."""
        return [run for run in self.runs if not (run.ended or run.run_alone)]


@dataclass
class _InFlight:
    """A sequence in flight: its run, its seconds, and the number of other sequences that were computed with it."""

    run: RunWriter
    prompt: Prompt
    admitted_with: int  # sequences of one admission, including itself
    prefill_seconds: float
    prefilled: bool = True  # False if it used the context that another question prefilled
    decode_seconds: float = 0.0
    most_in_flight: int = 1  # maximum number of sequences in flight at one time, including itself
    admitted_at: float = field(default_factory=time.monotonic)

    @property
    def live(self) -> bool:
        """Whether its run still needs it."""
        return not (self.run.ended or self.run.run_alone)

    @property
    def alone(self) -> bool:
        """Whether it was never batched with another sequence; otherwise its seconds are meaningless."""
        return self.admitted_with == self.most_in_flight == 1


class Scheduler:
    """Computes the examples of some runs: sequences are admitted while memory allows, and removed when they finish.

    A sequence that exceeds its budget or has NaN logits is a failed sample of its run. A sequence that ran out of
    memory is admitted again with a smaller batch. After any other error the run is computed alone, after the batch.
    """

    def __init__(
        self, loaded: LoadedModel, items: Sequence[WorkItem], planner: MemoryPlanner, totals: Totals, advance: Advance
    ) -> None:
        self._loaded, self._planner, self._totals, self._advance = loaded, planner, totals, advance
        graph = any(run.run.cuda_graph for item in items for run in item.runs)
        self._batch = DecodeBatch(loaded.model, graph, strict=False)
        self._waiting = deque(_Waiting(item.prompt, list(item.runs)) for item in items)
        self._in_flight: dict[LiveSequence, _InFlight] = {}
        self._writer = OrderedWriter(items)

    def work(self) -> None:
        """Compute everything except runs that are to be computed alone. Raises BatchError if a whole batch failed."""
        while self._waiting or self._in_flight:
            self._fill()
            if self._in_flight:
                self._step()
            self._writer.write()

    # --- admission -------------------------------------------------------------------------------------------------
    def _fill(self) -> None:
        """Admit sequences until no more fit, or until the oldest one in flight has waited too long."""
        while self._waiting:
            oldest = next(iter(self._in_flight.values()), None)
            if oldest is not None and time.monotonic() - oldest.admitted_at > MAX_WAIT:
                return
            first = self._waiting[0]
            runs = first.live
            if not runs:
                self._waiting.popleft()
                continue
            if not self._batch.can_admit(self._request(first)):
                return
            some = [first, *self._questions(first, runs)]
            prompts = [one.prompt for one in some]
            count = self._planner.fits(prompts, runs, self._batch.in_flight, self._batch.nbytes)
            if not count:
                return
            if count < len(runs):
                self._waiting[0] = _Waiting(first.prompt, runs[count:], first.request)
                self._admit([first], runs[:count])
                continue
            some = some[: count // len(runs)]
            for _ in some:
                self._waiting.popleft()
            self._admit(some, runs)

    def _questions(self, first: _Waiting, runs: Sequence[RunWriter]) -> list[_Waiting]:
        """The next questions for the same runs that can share the prefill of the first one's context."""
        context = first.prompt.context_hash
        if context is None:
            return []
        following = islice(self._waiting, 1, None)
        found = takewhile(lambda one: one.prompt.context_hash == context and one.live == runs, following)
        return list(takewhile(lambda one: self._batch.shares_prompt(self._request(first), self._request(one)), found))

    def _request(self, waiting: _Waiting) -> Request:
        if waiting.request is None:
            waiting.request = request_for(waiting.runs[0].run, self._loaded, waiting.prompt)
        return waiting.request

    def _admit(self, some: Sequence[_Waiting], runs: Sequence[RunWriter]) -> None:
        """Prefill a prompt, or a context and some questions about it, for some runs."""
        run, model, before = runs[0].run, self._loaded.model, self._batch.nbytes
        prompt, count = some[0].prompt, len(some) * len(runs)
        device.reset_peak(run.device)
        allocated, began = device.peak(run.device), now(model)
        try:
            sequences = self._batch.admit_questions(list(map(self._request, some)), [run.run.policy for run in runs])
        except Exception as error:
            raise BatchError(message(error)) from error
        seconds = now(model) - began
        self._totals.prefilled(len(prompt.ids), count, seconds)
        if allocated is not None:
            taken = (device.peak(run.device) or 0) - allocated
            self._planner.measured(prompt, run, taken - (self._batch.nbytes - before))
        for one, answers in zip(some, sequences, strict=True):
            for sequence, writer in zip(answers, runs, strict=True):
                self._in_flight[sequence] = _InFlight(writer, one.prompt, count, seconds, one is some[0])
                self._planner.admitted(sequence, writer, one.prompt)
        in_flight = self._batch.in_flight
        for sequence, flight in self._in_flight.items():
            flight.most_in_flight = max(flight.most_in_flight, in_flight + sequence.done)
        self._finish([sequence for sequence in self._in_flight if sequence.done])
        self._advance(0, f"{in_flight} sequences, prompts")

    # --- decoding --------------------------------------------------------------------------------------------------
    def _step(self) -> None:
        """Decode one token of every sequence in flight."""
        sequences, began = self._batch.in_flight, time.perf_counter()
        try:
            ended = self._batch.step()
        except Exception as error:
            raise BatchError(message(error)) from error
        seconds = time.perf_counter() - began
        self._totals.stepped(sequences, seconds)
        for flight in self._in_flight.values():
            flight.decode_seconds += seconds
        self._finish(ended)
        self._advance(0, f"{self._batch.in_flight} sequences, {self._totals.tokens_per_second:.0f} tokens/s")

    def _finish(self, ended: Sequence[LiveSequence]) -> None:
        """Deliver the samples or errors of finished sequences to their runs."""
        in_flight = self._batch.in_flight + len(ended)
        for sequence in ended:
            flight = self._in_flight.pop(sequence)
            error = sequence.error = sequence.error and as_memory_error(sequence.error)
            nbytes = None if error or sequence.cache is None else sequence.cache.nbytes
            self._planner.finished(sequence, flight.run, flight.prompt, nbytes)
            if not flight.live:
                continue
            if error is None or flight.alone or isinstance(error, OWN_ERRORS):
                with flight.run.isolated():
                    flight.run.deliver(_sample(flight, sequence))
                    self._advance(1)
            elif isinstance(error, OUT_OF_MEMORY):
                self._waiting.appendleft(_Waiting(flight.prompt, [flight.run]))
                self._planner.ran_out(in_flight)
            else:
                flight.run.run_alone = True
                log.warning("%s: %s; it is computed by itself, after the others", flight.run.run_id, message(error))
        self._drop_unwanted()

    def _drop_unwanted(self) -> None:
        """Remove the sequences of runs that ended or are to be computed alone."""
        unwanted = {sequence: flight for sequence, flight in self._in_flight.items() if not flight.live}
        if not unwanted:
            return
        try:
            self._batch.drop(unwanted)
        except Exception as error:
            raise BatchError(message(error)) from error
        for sequence, flight in unwanted.items():
            del self._in_flight[sequence]
            self._planner.finished(sequence, flight.run, flight.prompt, None)


def _sample(flight: _InFlight, sequence: LiveSequence) -> Sample:
    """The sample of a finished sequence. Raises an error that ends its run."""
    run = flight.run.run
    if isinstance(sequence.error, FAILURES):
        return failed(run, flight.prompt, sequence.error)
    if sequence.error is not None:
        raise sequence.error
    assert sequence.cache is not None
    done = Completion(
        sequence.tokens,
        sequence.cache,
        sequence.decode_steps,
        sequence.sharing,
        flight.most_in_flight,
        recomputed=flight.prompt.known if flight.prefilled else 0,
        prefill_seconds=flight.prefill_seconds if flight.alone else None,
        decode_seconds=flight.decode_seconds if flight.alone else None,
        device_peak_bytes=device.peak(run.device) if flight.alone else None,
    )
    return answered(run, flight.prompt, done)


def one_by_one(loaded: LoadedModel, items: Sequence[WorkItem], advance: Advance) -> None:
    """Compute examples one after another, each run by itself, so that its seconds are its own."""
    writer = OrderedWriter(items)
    for run in {run for item in items for run in item.runs}:
        run.run_alone = False  # here every run is waited for
    for _, some in groupby(items, key=lambda item: item.conversation):
        turns = list(some)
        for run in {run: None for turn in turns for run in turn.missing}:
            talks: dict[int | None, Conversation | None] = {}  # by sample
            for turn in turns:
                if run in turn.missing:
                    with run.isolated():
                        number = turn.prompt.sample
                        talk = talks.pop(number, None) or conversation(run.run, loaded, turn.prompt)
                        sample = run_alone(run.run, loaded, turn.prompt, _Report(advance), talk)
                        run.deliver(sample)
                        if not sample.error:  # after an error the state of the cache is unknown
                            talks[number] = talk
                    writer.write()


class _Report:
    """Advances a bar by the units since the last call."""

    def __init__(self, advance: Advance) -> None:
        self._advance, self._shown = advance, 0

    def __call__(self, done: int) -> None:
        self._advance(done - self._shown)
        self._shown = done
