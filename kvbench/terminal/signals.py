"""How a command of ours is asked to stop: SIGTERM is Ctrl-C, and both end in one sentence."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
UNTOUCHED = (signal.default_int_handler, signal.SIG_DFL)
"""Handlers nobody chose; a shell's background jobs ignore SIGINT, which stays so."""


class Terminated(KeyboardInterrupt):
    """SIGTERM: what Ctrl-C is, but for the exit code."""


def exit_code(error: KeyboardInterrupt) -> int:
    """128 and the number of the signal, as shells count."""
    return 128 + (signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT)


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """SIGINT and SIGTERM raise KeyboardInterrupt meanwhile, so that finished work is kept and told.

    It leaves as that, also where a library made another error of it, as transformers does while it imports its modules.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked: list[KeyboardInterrupt] = []

    def ask(number: int, frame: FrameType | None) -> None:
        asked.append(Terminated() if number == signal.SIGTERM else KeyboardInterrupt())
        raise asked[-1]

    ours = SIGNALS if signal.getsignal(signal.SIGINT) in UNTOUCHED else SIGNALS[1:]
    before = {number: signal.signal(number, ask) for number in ours}
    try:
        yield
    except Exception as error:
        if asked:
            raise asked[0] from error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
