"""Runs whose examples have the model to themselves, one by one: what reads, what is replayed, what is timed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from kvbench.engine.answers import alone, conversation
from kvbench.engine.conversation import Conversation
from kvbench.engine.work import OrderedWriter, WorkItem
from kvbench.models.loading import LoadedModel
from kvbench.terminal.bars import Advance


def one_by_one(loaded: LoadedModel, turns: Sequence[WorkItem], advance: Advance) -> None:
    """Work the turns of some runs example after example, and each run by itself: seconds are then its own."""
    steps = OrderedWriter(turns)
    for run in {run for turn in turns for run in turn.runs}:
        run.apart = False  # here each is by itself, and what lacks is waited for
    for _, some in groupby(turns, key=lambda turn: turn.first):
        asked = list(some)
        for run in {run: None for turn in asked for run in turn.lacking}:
            talks: dict[int | None, Conversation | None] = {}  # by sample
            for turn in asked:
                if run in turn.lacking:
                    with run.own():
                        number = turn.prompt.sample
                        talk = talks.pop(number, None) or conversation(run.cell, loaded, turn.prompt)
                        sample = alone(run.cell, loaded, turn.prompt, _Report(advance), talk)
                        run.deliver(sample)
                        if not sample.error:  # else nobody knows what its cache holds
                            talks[number] = talk
                    steps.write()


class _Report:
    """Moves a bar on by what is new since the last call."""

    def __init__(self, advance: Advance) -> None:
        self._advance, self._shown = advance, 0

    def __call__(self, done: int) -> None:
        self._advance(done - self._shown)
        self._shown = done
