"""A job that has to leave its node: it finishes its example if there is time, and goes back to the queue."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from kvbench.sweeps import queue
from kvbench.terminal.command import say
from kvbench.terminal.signals import interrupt

if TYPE_CHECKING:
    from kvbench.sweeps.recorder import Recorder  # imports torch: too late to listen

FINISH_SECONDS = 60
"""So long an example that is being computed may take to end; then it is dropped, and computed again later."""


_told = False  # that SLURM wants the node back: perhaps while torch is still being imported


def listen() -> None:
    """Take note of SIGUSR1 from now on. The first thing a job does: unheard, the signal would end the process."""
    if queue.here() is not None:
        signal.signal(signal.SIGUSR1, _note)


def _note(number: int, frame: FrameType | None) -> None:
    global _told
    _told = True


@contextmanager
def leaving(recorder: Recorder, requeues: bool) -> Iterator[None]:
    """Inside a job: SIGUSR1 (the time limit is near, or another job needs the node) ends it in order.

    SIGTERM, as everywhere, is Ctrl-C: SLURM sends it where somebody cancels the job, and to some that are preempted.
    """
    task = queue.here()
    if task is None:
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        _note(number, frame)
        say("SLURM wants the node back: finishing this example")
        recorder.stop_soon()
        signal.alarm(FINISH_SECONDS)

    signal.signal(signal.SIGALRM, interrupt)
    signal.signal(signal.SIGUSR1, leave)
    try:
        if _told:
            leave(signal.SIGUSR1, None)
        yield
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # all is done
        signal.alarm(0)
    except KeyboardInterrupt:
        for number in (signal.SIGUSR1, signal.SIGALRM, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        preempted = queue.was_preempted(task)
        if not requeues or not (_told or preempted):
            raise
        if not recorder.written and not preempted:
            say("launcher.timeout_min is too short: not one example was finished in it, so the job is not requeued")
            raise
        say(f"job {task} goes back to the queue and continues there")
        if not queue.requeue(task):
            say(f"SLURM did not take job {task} back: `python -m kvbench.sweep resume` continues")
        raise
