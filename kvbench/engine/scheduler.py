"""The scheduler: admits sequences while memory allows, decodes them as one batch, and delivers their samples.

A run that is computed by itself has a batch of one sequence. Examples start in order, and `Pace` limits how many have
started and are not on disk.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, takewhile
from typing import Any, NoReturn

from transformers import PreTrainedModel

from kvbench.engine.answers import (
    FAILURES,
    OUT_OF_MEMORY,
    OWN_ERRORS,
    HistoryError,
    answered,
    as_memory_error,
    computed_whole,
    failed,
    kept_at_start,
    likelihood_of,
    request_for,
)
from kvbench.engine.batch import DecodeBatch
from kvbench.engine.divergence import full_cache
from kvbench.engine.memory import MemoryPlanner
from kvbench.engine.pace import Pace, Work
from kvbench.engine.prefill import blocks_join
from kvbench.engine.prompts import in_batch, is_generated
from kvbench.engine.run_writer import RunWriter, WorkItem, one_by_one
from kvbench.engine.sequence import LiveSequence, Played, Request
from kvbench.engine.teacher_forcing import policy_for
from kvbench.errors import counted, one_line
from kvbench.models.devices import now, peak, reset_peak
from kvbench.models.loading import LoadedModel
from kvbench.models.prompt import Prompt
from kvbench.results.samples import Sample
from kvbench.results.session import Totals
from kvbench.terminal.progress import Advance

log = logging.getLogger(__name__)


@dataclass
class _InFlight:
    """A sequence in flight: its run, its seconds, and the number of other sequences that were computed with it."""

    run: RunWriter
    item: WorkItem
    admitted_with: int  # sequences of one admission, including itself
    prefill_seconds: float
    recomputed: int  # prompt tokens that had been computed for an earlier question
    decode_seconds: float = 0.0
    most_in_flight: int = 1  # maximum number of sequences in flight at one time, including itself
    kept: dict[str, Any] | None = None  # when the answer begins, see `kept_at_start`

    def begin(self, sequence: LiveSequence) -> None:
        """Record what is kept of the prompt, if its evictions are over."""
        late = self.run.run.policy.schedule.late and not sequence.decode_steps
        if self.kept is None and sequence.error is None and not late:
            self.kept = kept_at_start(self.run.run, self.item.prompt, sequence)

    @property
    def alone(self) -> bool:
        """Whether it was never batched with another sequence; otherwise its seconds are meaningless."""
        return self.admitted_with == self.most_in_flight == 1


class Scheduler:
    """Computes the examples of some runs: sequences are admitted while memory allows, and removed when they finish.

    A sequence that exceeds its budget or has NaN logits is a failed sample of its run. A sequence that ran out of
    memory is admitted again with a smaller batch. After any other error in a batch, the run is computed alone later.
    An error of a sequence that is alone is the error of its sample or of its run. limit: maximum number of sequences in
    a batch; None: as memory allows; 1: each run by itself, so that its seconds are its own.
    """

    def __init__(
        self, loaded: LoadedModel, items: Sequence[WorkItem], limit: int | None, totals: Totals, advance: Advance
    ) -> None:
        self._loaded, self._totals, self._advance = loaded, totals, advance
        self._planner = MemoryPlanner(limit)
        self._pace = Pace(min((run.run.save_seconds for item in items for run in item.runs), default=0))
        self._graph = any(run.run.cuda_graph for item in items for run in item.runs)
        self._batch = self._new_batch()
        self._waiting = deque(one_by_one(items) if limit == 1 else items)
        self._in_flight: dict[LiveSequence, _InFlight] = {}
        # by conversation, run (None: the reference of comparisons) and sample
        self._played: dict[tuple[int, RunWriter | None, int | None], Played] = {}

    def _new_batch(self) -> DecodeBatch:
        return DecodeBatch(self._loaded.model, self._graph, strict=False)

    def work(self) -> None:
        """Compute everything except runs that are to be computed alone (`RunWriter.run_alone`)."""
        while self._waiting or self._in_flight:
            self._fill()
            if self._in_flight:
                self._step()

    # --- admission -------------------------------------------------------------------------------------------------
    def _fill(self) -> None:
        """Admit sequences until no more fit, or until samples of those in flight would be written too late."""
        while self._waiting:
            first = self._waiting[0]
            runs = first.live
            if not runs:
                self._waiting.popleft()
                continue
            if not in_batch(runs[0].run, first.prompt):
                self._waiting.popleft()  # alone: the limit of its group of runs is 1
                whole = partial(computed_whole, runs[0].run, self._loaded, first.prompt, self._advance)
                self._deliver(runs[0], first.prompt, whole)
                continue
            if not self._batch.can_admit(self._request(first)) or not self._may_start(first, len(runs)):
                return
            items = self._entering(first, runs)
            in_flight = [(flight.run, flight.item.prompt) for flight in self._in_flight.values()]
            count = self._planner.fits([one.prompt for one in items], runs, in_flight, self._batch.nbytes)
            if not count:
                return
            if count < len(runs):
                first.start = first.start or time.monotonic()
                self._waiting[0] = replace(first, runs=runs[count:])
                self._admit([first], runs[:count])
                continue
            items = items[: count // len(runs)]
            for _ in items:
                self._waiting.popleft()
            self._admit(items, runs)

    def _may_start(self, item: WorkItem, count: int, before: Sequence[WorkItem] = ()) -> bool:
        """Whether an example may start for `count` runs; the rest of the oldest one in flight always may.

        before: other examples that start with it, whose prompts are prefilled in the same calls.
        """
        oldest = next(iter(self._in_flight.values()), None)
        if not before and (oldest is None or item.index <= oldest.item.index):
            return True
        now, steps, started = time.monotonic(), self._request(item).max_new_tokens, list[Work]()
        for sequence, flight in self._in_flight.items():
            most = sequence.request.max_new_tokens
            seconds = now - (flight.item.start or now)
            started.append(Work(seconds, len(flight.item.prompt.ids), most, most - len(sequence.tokens)))
        new = Work(0.0, sum(len(one.prompt.ids) for one in (*before, item)), steps, steps)
        return self._pace.may_start(started, new, self._batch.in_flight + len(before) * count, count)

    def _entering(self, first: WorkItem, runs: Sequence[RunWriter]) -> list[WorkItem]:
        """An item, and the next ones for the same runs that enter with it.

        They are questions about its context, whose prefill they share, or prompts whose blocks are rows of its calls.
        """
        model, context, found = self._loaded.model, first.prompt.context_hash, [first]
        joins = context is None and _blocks_join(model, first)
        for one in islice(self._waiting, 1, None) if joins or (context and not first.prompt.turns) else ():
            enters = one.live == runs and one.prompt.context_hash == context
            enters = enters and self._batch.can_admit(*map(self._request, (*found, one)))
            if not enters or (joins and not (_blocks_join(model, one) and self._may_start(one, len(runs), found))):
                break
            found.append(one)
        return found

    def _request(self, item: WorkItem) -> Request:
        if item.request is None:
            item.request = request_for(item.runs[0].run, self._loaded, item.prompt, self._advance)
        return item.request

    def _admit(self, items: Sequence[WorkItem], runs: Sequence[RunWriter]) -> None:
        """Prefill prompts, or a context and some questions about it, for some runs."""
        first, run, model, before = items[0], runs[0].run, self._loaded.model, self._batch.nbytes
        prefilled = items if first.prompt.context_hash is None else [first]
        count, tokens = len(items) * len(runs), sum(len(one.prompt.ids) for one in prefilled)
        requests = list(map(self._request, items))
        played = [self._history(first, run) for run in runs]
        if first.prompt.turns and not first.prompt.own and self._continues(first, runs):
            requests = [replace(requests[0], next_turn="golden")]
        reset_peak(run.device)
        allocated, began, start = peak(run.device), now(model), time.monotonic()
        for one in items:
            one.start = one.start or start
        try:
            if first.prompt.own and len(first.prompt.turns) > 1 and None in played:
                raise HistoryError("the answer of an earlier turn failed, so this turn has no history")
            policies = [policy_for(run.run.policy, first.prompt) for run in runs]
            reference = full_cache() if run.task.divergence else None
            before_it = [] if reference is None else [self._history(first, None)]
            admitted = self._batch.admit(requests, policies, [*before_it, *played], reference)
        except Exception as error:
            self._fail(error, [(run, one.prompt) for one in items for run in runs])
            return
        seconds = now(model) - began
        self._totals.prefilled(tokens, count, seconds)
        self._pace.prefilled(tokens, count // len(prefilled), seconds)
        if allocated is not None:
            taken = (peak(run.device) or 0) - allocated
            self._planner.measured(first.prompt, run, taken - (self._batch.nbytes - before))
        for one, own in zip(items, admitted, strict=True):
            for sequence, writer, history in zip(own, runs, played, strict=True):
                known = one.prompt.known if one is first else 0
                recomputed = known if history is None else history.recomputed
                self._in_flight[sequence] = _InFlight(writer, one, count, seconds, recomputed)
                for key, kept in ((writer, sequence), (None, sequence.reference)):
                    if kept is not None and kept.played is not None and kept.error is None:
                        self._played[one.conversation, key, one.prompt.sample] = kept.played
        in_flight = self._batch.in_flight
        for sequence, flight in self._in_flight.items():
            flight.begin(sequence)
            flight.most_in_flight = max(flight.most_in_flight, in_flight + sequence.done)
        self._finish([sequence for sequence in self._in_flight if sequence.done])
        self._advance(0, f"{counted(in_flight, 'sequence')}, prefill")

    # --- conversations ---------------------------------------------------------------------------------------------
    def _history(self, item: WorkItem, run: RunWriter | None) -> Played | None:
        """The turns before this one under a run's policy, if they were computed. Histories of others are freed."""
        self._played = {key: one for key, one in self._played.items() if key[0] == item.conversation}
        found = self._played.pop((item.conversation, run, item.prompt.sample), None)
        return found if found is not None and found.feeds < len(item.prompt.turns) else None

    def _continues(self, item: WorkItem, runs: Iterable[RunWriter]) -> bool:
        """Whether a later turn of the conversation is waiting for one of the runs."""
        found = takewhile(lambda one: one.conversation == item.conversation, self._waiting)
        later = [one for one in found if len(one.prompt.turns) > len(item.prompt.turns)]
        return any(run in one.runs for one in later for run in runs)

    # --- decoding --------------------------------------------------------------------------------------------------
    def _step(self) -> None:
        """Decode one token of every sequence in flight."""
        sequences, began = self._batch.in_flight, time.perf_counter()
        try:
            ended = self._batch.step()
        except Exception as error:
            self._fail(error, [])
            return
        seconds = time.perf_counter() - began
        self._totals.stepped(sequences, seconds)
        self._pace.stepped(sequences, seconds)
        for sequence, flight in self._in_flight.items():
            flight.decode_seconds += seconds
            flight.begin(sequence)
        self._finish(ended)
        self._advance(
            0, f"{counted(self._batch.in_flight, 'sequence')}, {self._totals.tokens_per_second:.0f} decoded tokens/s"
        )

    def _finish(self, ended: Sequence[LiveSequence]) -> None:
        """Deliver the samples or errors of finished sequences to their runs."""
        in_flight = self._batch.in_flight + len(ended)
        for sequence in ended:
            flight = self._in_flight.pop(sequence)
            error = sequence.error = sequence.error and as_memory_error(sequence.error)
            if error is None and sequence.cache is not None:
                self._planner.finished(flight.run, flight.item.prompt, sequence.cache.nbytes)
            if not flight.run.live:
                continue
            if error is None or flight.alone or isinstance(error, OWN_ERRORS):
                self._keep_own_history(flight, sequence)
                self._deliver(flight.run, flight.item.prompt, partial(_sample, flight, sequence))
            elif isinstance(error, OUT_OF_MEMORY):
                self._waiting.appendleft(replace(flight.item, runs=[flight.run]))
                self._planner.ran_out(in_flight)
            else:
                self._compute_alone_later(flight.run, error)
        self._drop_unwanted()

    def _keep_own_history(self, flight: _InFlight, sequence: LiveSequence) -> None:
        """Keep the cache of an answer that is part of the history of a later turn."""
        item, prompt = flight.item, flight.item.prompt
        if sequence.error is None and sequence.cache is not None and prompt.own and self._continues(item, [flight.run]):
            pending = sequence.tokens[sequence.decode_steps :]
            again = sum(prompt.turns) if flight.run.has(prompt.example.index) else 0
            played = Played(sequence.cache, len(prompt.turns), pending, again)
            self._played[item.conversation, flight.run, prompt.sample] = played

    def _deliver(self, run: RunWriter, prompt: Prompt, compute: Callable[[], Sample]) -> None:
        """Write the sample of an example, or end its run by an error that is not one of the example."""
        wanted = not run.has(prompt.example.index)
        with run.isolated():
            try:
                sample = compute()
            except Exception as caught:
                error = as_memory_error(caught)
                if not isinstance(error, FAILURES):
                    raise
                sample = failed(run.run, prompt, error)
            run.deliver(sample)
            if wanted:
                self._advance(1)  # scored tokens but one are reported after every call

    def _fail(self, error: Exception, admitted: Sequence[tuple[RunWriter, Prompt]]) -> None:
        """An error of the batch, or of sequences that are being admitted: the batch begins anew without them."""
        failed = [*((flight.run, flight.item.prompt) for flight in self._in_flight.values()), *admitted]
        self._in_flight.clear()
        self._batch = self._new_batch()
        for run, prompt in failed:
            if len(failed) == 1:
                self._deliver(run, prompt, partial(_raise, error))
            else:
                self._compute_alone_later(run, error)

    def _compute_alone_later(self, run: RunWriter, error: Exception) -> None:
        """Compute a run after the batch: only by itself an error is known to be its own."""
        if not run.run_alone:
            run.run_alone = True
            log.warning("%s: %s; it is computed by itself, after the others", run.run_id, one_line(error))

    def _drop_unwanted(self) -> None:
        """Remove the sequences of runs that ended or are to be computed alone."""
        unwanted = [sequence for sequence, flight in self._in_flight.items() if not flight.run.live]
        self._batch.drop(unwanted)
        for sequence in unwanted:
            del self._in_flight[sequence]


def _blocks_join(model: PreTrainedModel, item: WorkItem) -> bool:
    """Whether all runs of an item prefill its prompt in blocks, which can be rows of calls with those of others."""
    if not is_generated(item.prompt) or item.prompt.example.reading is not None:
        return False
    return all(blocks_join(model, run.run.policy, len(item.prompt.ids)) for run in item.runs)


def _raise(error: Exception) -> NoReturn:
    raise error


def _sample(flight: _InFlight, sequence: LiveSequence) -> Sample:
    """The sample of a finished sequence. Raises the sequence's error."""
    if sequence.error is not None:
        raise sequence.error
    assert sequence.cache is not None
    run, prompt, seconds = flight.run.run, flight.item.prompt, flight.decode_seconds
    if sequence.scores is None:
        compared = None if sequence.reference is None else sequence.divergences
        sample = answered(run, prompt, sequence.tokens, sequence.cache, sequence.decode_steps, compared, flight.kept)
    else:
        sample, seconds = likelihood_of(run, prompt, sequence.policy, sequence.scores), sequence.scores.seconds
    sample = replace(
        sample,
        recomputed_tokens=None if prompt.example.shared is None else flight.recomputed,
        shared_prefill=sequence.sharing,
        rows_in_flight=flight.most_in_flight,
    )
    if not flight.alone or sequence.reference is not None:  # with the full cache beside it
        return sample
    return replace(
        sample,
        prefill_seconds=round(flight.prefill_seconds - (seconds if sequence.scores else 0), 6),
        decode_seconds=round(seconds, 6),
        device_peak_bytes=peak(run.device),
    )
