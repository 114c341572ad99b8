"""Signals that stop a command: SIGTERM is handled like Ctrl-C, and both end with one message."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
UNTOUCHED = (signal.default_int_handler, signal.SIG_DFL)
"""Default handlers, which may be replaced. Background jobs of a shell ignore SIGINT; this is kept."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, handled like Ctrl-C except for the exit code."""


def exit_code(error: KeyboardInterrupt) -> int:
    """128 plus the number of the signal, as in shells."""
    return 128 + (signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT)


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """SIGINT and SIGTERM raise KeyboardInterrupt inside this context, so that finished work is kept and reported.

    KeyboardInterrupt is raised even if a library turned it into another error, as transformers does during imports.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[KeyboardInterrupt] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        received.append(Terminated() if number == signal.SIGTERM else KeyboardInterrupt())
        raise received[-1]

    ours = SIGNALS if signal.getsignal(signal.SIGINT) in UNTOUCHED else SIGNALS[1:]
    before = {number: signal.signal(number, interrupt) for number in ours}
    try:
        yield
    except Exception as error:
        if received:
            raise received[0] from error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
