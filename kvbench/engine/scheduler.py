"""Runs that share prompts, worked as rows: one prefill serves all of them, and all rows in flight decode together."""

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
from kvbench.engine.sequence import LiveSequence, Request
from kvbench.engine.turns import InStep, Turn
from kvbench.inference.generate import now
from kvbench.models.loading import LoadedModel
from kvbench.models.prompts import Prompt
from kvbench.runs.running import RunWriter
from kvbench.runs.sample import Sample
from kvbench.runs.totals import Totals
from kvbench.terminal.bars import Advance

AT_ONCE = 16
"""Examples whose blocks are read side by side, at most: their samples are there at one time."""
PATIENCE = 30.0
"""Seconds the oldest row in flight waits for prefills of others: about as much is lost where the process is killed."""

log = logging.getLogger(__name__)


class BatchError(RuntimeError):
    """Rows broke together, by an error that none of them owns."""


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
    """A row in flight: whose it is, and how much of its life it had to itself."""

    run: RunWriter
    prompt: Prompt
    company: int  # rows that entered with it, itself included
    prefill_seconds: float
    decode_seconds: float = 0.0
    beside: int = 1  # the most rows ever in flight with it, itself included
    came: float = field(default_factory=time.monotonic)

    @property
    def live(self) -> bool:
        """Whether somebody waits for it."""
        return not (self.run.ended or self.run.apart)

    @property
    def alone(self) -> bool:
        """Whether no other row ever had a part in what happened to it."""
        return self.company == self.beside == 1


class Scheduler:
    """Works the turns of some runs: rows enter while there is room, and leave when they end.

    A row that broke its budget, or whose logits were no numbers, is a failed sample of its run. One that ran out of
    memory beside others enters again, beside fewer. Any other error in company sets the run apart: what it lacks is
    left to be computed by itself, where the error is its own.
    """

    def __init__(
        self, loaded: LoadedModel, turns: Sequence[Turn], room: MemoryPlanner, totals: Totals, advance: Advance
    ) -> None:
        self._loaded, self._room, self._totals, self._advance = loaded, room, totals, advance
        self._rows = DecodeBatch(loaded.model)
        self._waiting = deque(_Waiting(turn.prompt, list(turn.runs)) for turn in turns)
        self._seats: dict[LiveSequence, _InFlight] = {}
        self._steps = InStep(turns)

    def work(self) -> None:
        """Compute everything but what is set apart. Raises RowsError where rows broke together."""
        while self._waiting or self._seats:
            self._fill()
            if self._seats:
                self._step()
            self._steps.write()

    # --- rows enter ------------------------------------------------------------------------------------------------
    def _fill(self) -> None:
        """Let rows enter until there is no room."""
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
        """Whether the oldest row, and with it what may not be written before it, is to be decoded now."""
        oldest = next(iter(self._seats.values()), None)
        return oldest is not None and time.monotonic() - oldest.came > PATIENCE

    def _fitting(self, first: _Waiting, runs: Sequence[RunWriter]) -> int:
        """For how many of its runs an example may enter now."""
        if not self._rows.takes(self._asked(first)):
            return 0
        return self._room.fits(first.prompt, runs, self._rows.in_flight, self._rows.nbytes)

    def _companions(self, first: _Waiting, runs: Sequence[RunWriter]) -> list[_Waiting]:
        """The examples right behind for the same runs that may enter with it, as many as fit.

        Those that ask about its context, or, where a run reads prompts in blocks, any that can stand beside it.
        """
        context = first.prompt.context_hash
        if context is None and not any(_reads_blocks(run, first.prompt) for run in runs):
            return []
        most, fits = (AT_ONCE, self._rows.stands_beside) if context is None else (None, self._rows.joins)
        behind = islice(self._waiting, 1, most)
        asked = list(takewhile(lambda one: one.prompt.context_hash == context and one.live == runs, behind))
        asked = list(takewhile(lambda one: fits(self._asked(first), self._asked(one)), asked))
        prompts = [one.prompt for one in asked]
        return asked[: self._room.joins(first.prompt, prompts, runs, self._rows.in_flight, self._rows.nbytes)]

    def _asked(self, waiting: _Waiting) -> Request:
        if waiting.request is None:
            waiting.request = request(waiting.runs[0].cell, self._loaded, waiting.prompt)
        return waiting.request

    def _admit(self, asked: Sequence[_Waiting], runs: Sequence[RunWriter]) -> None:
        """Take in prompts for some runs; or one context, and all that is asked about it."""
        cell, model, before = runs[0].cell, self._loaded.model, self._rows.nbytes
        prompt, device, count = asked[0].prompt, cell.device, len(asked) * len(runs)
        read = asked if prompt.context_hash is None else asked[:1]
        admit = self._rows.admit_examples if len(read) > 1 else self._rows.admit_questions
        device_memory.forget_peak(device)
        allocated, began = device_memory.peak(device), now(model)
        try:
            rows = admit(list(map(self._asked, asked)), [run.cell.policy for run in runs])
        except Exception as error:
            raise BatchError(sentence(error)) from error
        seconds = now(model) - began
        self._totals.prefilled([len(one.prompt.ids) for one in read], count, seconds)
        if allocated is not None and len(read) == 1:
            taken = (device_memory.peak(device) or 0) - allocated
            self._room.measured(prompt, cell, taken - (self._rows.nbytes - before))
        for one, answering in zip(asked, rows, strict=True):
            for row, run in zip(answering, runs, strict=True):
                self._seats[row] = _InFlight(run, one.prompt, count, seconds)
                self._room.entered(row, run, one.prompt)
        in_flight = self._rows.in_flight
        for row, seat in self._seats.items():
            seat.beside = max(seat.beside, in_flight + row.done)
        self._leave([row for row in self._seats if row.done])
        self._advance(0, f"{in_flight} rows, prompts")

    # --- and leave -------------------------------------------------------------------------------------------------
    def _step(self) -> None:
        """One token more for every row in flight."""
        rows, began = self._rows.in_flight, time.perf_counter()
        try:
            ended = self._rows.step()
        except Exception as error:
            raise BatchError(sentence(error)) from error
        seconds = time.perf_counter() - began
        self._totals.stepped(rows, seconds)
        for seat in self._seats.values():
            seat.decode_seconds += seconds
        self._leave(ended)
        self._advance(0, f"{self._rows.in_flight} rows, {self._totals.tokens_per_second:.0f} tokens/s")

    def _leave(self, ended: Sequence[LiveSequence]) -> None:
        """Rows ended: their samples, or their errors, go to their runs."""
        in_flight = self._rows.in_flight + len(ended)
        for row in ended:
            seat = self._seats.pop(row)
            error = row.error = row.error and told_apart(row.error)
            self._room.left(row, seat.run, seat.prompt, None if error or row.cache is None else row.cache.nbytes)
            if not seat.live:
                continue
            if error is None or seat.alone or isinstance(error, OWN):
                self._deliver(seat, row)
            elif isinstance(error, NO_MEMORY):
                self._waiting.appendleft(_Waiting(seat.prompt, [seat.run]))
                self._room.ran_out(in_flight)
            else:
                seat.run.apart = True
                log.warning("%s: %s; it is computed by itself, after the others", seat.run.run_id, sentence(error))
        self._drop()

    def _drop(self) -> None:
        """Rows whose run ended, or goes on by itself, make room."""
        unwanted = {row: seat for row, seat in self._seats.items() if not seat.live}
        if not unwanted:
            return
        try:
            self._rows.drop(unwanted)
        except Exception as error:
            raise BatchError(sentence(error)) from error
        for row, seat in unwanted.items():
            del self._seats[row]
            self._room.left(row, seat.run, seat.prompt, None)

    def _deliver(self, seat: _InFlight, row: LiveSequence) -> None:
        """What became of a row becomes a sample, or the end of its run."""
        with seat.run.own():
            seat.run.deliver(_sample(seat, row))
            self._advance(1)


def _reads_blocks(run: RunWriter, prompt: Prompt) -> bool:
    return run.cell.policy.schedule.call_size(prompt.length) < prompt.length


def _sample(seat: _InFlight, row: LiveSequence) -> Sample:
    """The sample of a row that ended, failed or not. Raises what ends its run."""
    cell = seat.run.cell
    if isinstance(row.error, FAILURES):
        return failed(cell, seat.prompt, row.error)
    if row.error is not None:
        raise row.error
    assert row.cache is not None
    done = Completion(row.tokens, row.cache, row.decode_steps, row.sharing, seat.beside)
    if seat.alone:
        done = replace(done, prefill_seconds=seat.prefill_seconds, decode_seconds=seat.decode_seconds)
        done = replace(done, device_peak_bytes=device_memory.peak(cell.device))
    return answered(cell, seat.prompt, done)
