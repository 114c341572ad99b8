"""The scheduler: admits sequences while memory allows, steps all of them as one batch, and hands on what ended."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile

from kvbench.engine import device_memory
from kvbench.engine.answers import FAILURES, NO_MEMORY, OWN, Completion, answered, failed, request, sentence, told_apart
from kvbench.engine.batch import DecodeBatch
from kvbench.engine.memory import MemoryPlanner
from kvbench.engine.prompt_pass import now
from kvbench.engine.run_writer import RunWriter
from kvbench.engine.sequence import LiveSequence, Request
from kvbench.engine.work import OrderedWriter, WorkItem
from kvbench.models.loading import LoadedModel
from kvbench.models.prompts import Prompt
from kvbench.results.sample import Sample
from kvbench.results.totals import Totals
from kvbench.terminal.bars import Advance

AT_ONCE = 16
"""Examples whose blocks are read side by side, at most: their samples are there at one time."""
PATIENCE = 30.0
"""Seconds the oldest sequence waits for prefills of others: about as much is lost where the process is killed."""

log = logging.getLogger(__name__)


class BatchError(RuntimeError):
    """Sequences broke together, by an error that none of them owns."""


@dataclass
class _Waiting:
    """An example and the runs for which it has not entered yet."""

    prompt: Prompt
    runs: list[RunWriter]
    request: Request | None = None

    @property
    def live(self) -> list[RunWriter]:
        """Those that still wait for it."""
        return [run for run in self.runs if not (run.ended or run.apart)]


@dataclass
class _InFlight:
    """A sequence in flight: its run, its seconds, and with how many others it was computed."""

    run: RunWriter
    prompt: Prompt
    entered_with: int  # sequences that entered with it, itself included
    prefill_seconds: float
    reads: bool = True  # it had its context read, not another question about it
    decode_seconds: float = 0.0
    most_in_flight: int = 1  # the most sequences ever in flight with it, itself included
    admitted_at: float = field(default_factory=time.monotonic)

    @property
    def live(self) -> bool:
        """Whether somebody waits for it."""
        return not (self.run.ended or self.run.apart)

    @property
    def alone(self) -> bool:
        """True if the sequence was never batched with another; only then are its seconds meaningful."""
        return self.entered_with == self.most_in_flight == 1


class Scheduler:
    """Works the turns of some runs: sequences are admitted while memory allows, and leave when they end.

    A sequence that broke its budget, or whose logits were no numbers, is a failed sample of its run. One that ran out
    of memory in a batch is admitted again, in a smaller one. Any other error in a batch sets the run apart: what it
    lacks is left to be computed alone, where the error is its own.
    """

    def __init__(
        self, loaded: LoadedModel, turns: Sequence[WorkItem], planner: MemoryPlanner, totals: Totals, advance: Advance
    ) -> None:
        self._loaded, self._planner, self._totals, self._advance = loaded, planner, totals, advance
        graph = any(run.cell.cuda_graph for turn in turns for run in turn.runs)
        self._batch = DecodeBatch(loaded.model, graph, strict=False)
        self._waiting = deque(_Waiting(turn.prompt, list(turn.runs)) for turn in turns)
        self._in_flight: dict[LiveSequence, _InFlight] = {}
        self._steps = OrderedWriter(turns)

    def work(self) -> None:
        """Compute everything but what is set apart. Raises BatchError where sequences broke together."""
        while self._waiting or self._in_flight:
            self._fill()
            if self._in_flight:
                self._step()
            self._steps.write()

    # --- admission -------------------------------------------------------------------------------------------------
    def _fill(self) -> None:
        """Admit sequences until no more fit."""
        while self._waiting and not self._kept_waiting():
            first = self._waiting[0]
            if not first.live:
                self._waiting.popleft()
                continue
            runs = first.live
            count = self._fitting(first, runs)
            if not count:
                return
            if count < len(runs):
                self._waiting[0] = _Waiting(first.prompt, runs[count:], first.request)
                self._admit([first], runs[:count])
                continue
            others = self._companions(first, runs)
            for _ in (first, *others):
                self._waiting.popleft()
            self._admit([first, *others], runs)

    def _kept_waiting(self) -> bool:
        """Whether the oldest sequence, and with it what may not be written before it, is to be decoded now."""
        oldest = next(iter(self._in_flight.values()), None)
        return oldest is not None and time.monotonic() - oldest.admitted_at > PATIENCE

    def _fitting(self, first: _Waiting, runs: Sequence[RunWriter]) -> int:
        """For how many of its runs an example may enter now."""
        if not self._batch.can_admit(self._asked(first)):
            return 0
        return self._planner.fits(first.prompt, runs, self._batch.in_flight, self._batch.nbytes)

    def _companions(self, first: _Waiting, runs: Sequence[RunWriter]) -> list[_Waiting]:
        """The examples right behind for the same runs that may enter with it, as many as fit.

        Those that ask about its context, or, where a run reads prompts in blocks, any that can stand beside it.
        """
        context = first.prompt.context_hash
        if context is None and not any(_reads_blocks(run, first.prompt) for run in runs):
            return []
        most, fits = (AT_ONCE, self._batch.stands_beside) if context is None else (None, self._batch.joins)
        behind = islice(self._waiting, 1, most)
        asked = list(takewhile(lambda one: one.prompt.context_hash == context and one.live == runs, behind))
        asked = list(takewhile(lambda one: fits(self._asked(first), self._asked(one)), asked))
        prompts = [one.prompt for one in asked]
        return asked[: self._planner.joins(first.prompt, prompts, runs, self._batch.in_flight, self._batch.nbytes)]

    def _asked(self, waiting: _Waiting) -> Request:
        if waiting.request is None:
            waiting.request = request(waiting.runs[0].cell, self._loaded, waiting.prompt)
        return waiting.request

    def _admit(self, asked: Sequence[_Waiting], runs: Sequence[RunWriter]) -> None:
        """Take in prompts for some runs; or one context, and all that is asked about it."""
        cell, model, before = runs[0].cell, self._loaded.model, self._batch.nbytes
        prompt, device, count = asked[0].prompt, cell.device, len(asked) * len(runs)
        prefill = asked if prompt.context_hash is None else asked[:1]
        admit = self._batch.admit_examples if len(prefill) > 1 else self._batch.admit_questions
        device_memory.forget_peak(device)
        allocated, began = device_memory.peak(device), now(model)
        try:
            sequences = admit(list(map(self._asked, asked)), [run.cell.policy for run in runs])
        except Exception as error:
            raise BatchError(sentence(error)) from error
        seconds = now(model) - began
        self._totals.prefilled([len(one.prompt.ids) for one in prefill], count, seconds)
        if allocated is not None and len(prefill) == 1:
            taken = (device_memory.peak(device) or 0) - allocated
            self._planner.measured(prompt, cell, taken - (self._batch.nbytes - before))
        for one, answering in zip(asked, sequences, strict=True):
            for sequence, run in zip(answering, runs, strict=True):
                reads = one is asked[0] or prompt.context_hash is None
                self._in_flight[sequence] = _InFlight(run, one.prompt, count, seconds, reads)
                self._planner.entered(sequence, run, one.prompt)
        in_flight = self._batch.in_flight
        for sequence, flight in self._in_flight.items():
            flight.most_in_flight = max(flight.most_in_flight, in_flight + sequence.done)
        self._finish([sequence for sequence in self._in_flight if sequence.done])
        self._advance(0, f"{in_flight} sequences, prompts")

    # --- and leave -------------------------------------------------------------------------------------------------
    def _step(self) -> None:
        """One token more for every sequence in flight."""
        sequences, began = self._batch.in_flight, time.perf_counter()
        try:
            ended = self._batch.step()
        except Exception as error:
            raise BatchError(sentence(error)) from error
        seconds = time.perf_counter() - began
        self._totals.stepped(sequences, seconds)
        for flight in self._in_flight.values():
            flight.decode_seconds += seconds
        self._finish(ended)
        self._advance(0, f"{self._batch.in_flight} sequences, {self._totals.tokens_per_second:.0f} tokens/s")

    def _finish(self, ended: Sequence[LiveSequence]) -> None:
        """Sequences ended: their samples, or their errors, go to their runs."""
        in_flight = self._batch.in_flight + len(ended)
        for sequence in ended:
            flight = self._in_flight.pop(sequence)
            error = sequence.error = sequence.error and told_apart(sequence.error)
            nbytes = None if error or sequence.cache is None else sequence.cache.nbytes
            self._planner.left(sequence, flight.run, flight.prompt, nbytes)
            if not flight.live:
                continue
            if error is None or flight.alone or isinstance(error, OWN):
                self._deliver(flight, sequence)
            elif isinstance(error, NO_MEMORY):
                self._waiting.appendleft(_Waiting(flight.prompt, [flight.run]))
                self._planner.ran_out(in_flight)
            else:
                flight.run.apart = True
                log.warning("%s: %s; it is computed by itself, after the others", flight.run.run_id, sentence(error))
        self._drop()

    def _drop(self) -> None:
        """Sequences whose run ended, or goes on by itself, make room."""
        unwanted = {sequence: flight for sequence, flight in self._in_flight.items() if not flight.live}
        if not unwanted:
            return
        try:
            self._batch.drop(unwanted)
        except Exception as error:
            raise BatchError(sentence(error)) from error
        for sequence, flight in unwanted.items():
            del self._in_flight[sequence]
            self._planner.left(sequence, flight.run, flight.prompt, None)

    def _deliver(self, flight: _InFlight, sequence: LiveSequence) -> None:
        """What became of a sequence becomes a sample, or the end of its run."""
        with flight.run.own():
            flight.run.deliver(_sample(flight, sequence))
            self._advance(1)


def _reads_blocks(run: RunWriter, prompt: Prompt) -> bool:
    return run.cell.policy.schedule.call_size(prompt.length) < prompt.length


def _sample(flight: _InFlight, sequence: LiveSequence) -> Sample:
    """The sample of a sequence that ended, failed or not. Raises what ends its run."""
    cell = flight.run.cell
    if isinstance(sequence.error, FAILURES):
        return failed(cell, flight.prompt, sequence.error)
    if sequence.error is not None:
        raise sequence.error
    assert sequence.cache is not None
    done = Completion(sequence.tokens, sequence.cache, sequence.decode_steps, sequence.sharing, flight.most_in_flight)
    done = replace(done, recomputed=flight.prompt.known if flight.reads else 0)
    if flight.alone:
        done = replace(done, prefill_seconds=flight.prefill_seconds, decode_seconds=flight.decode_seconds)
        done = replace(done, device_peak_bytes=device_memory.peak(cell.device))
    return answered(cell, flight.prompt, done)
