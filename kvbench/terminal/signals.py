"""How a process of ours is asked to stop: SIGTERM is Ctrl-C, and both end in one sentence from the first instant on."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
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

    before = {number: signal.getsignal(number) for number in SIGNALS}
    if before[signal.SIGINT] in (_leave, *UNTOUCHED):
        signal.signal(signal.SIGINT, ask)
    signal.signal(signal.SIGTERM, ask)
    try:
        yield
    except Exception as error:
        if asked:
            raise asked[0] from error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def interrupt(number: int, frame: FrameType | None) -> None:
    """What a handler does."""
    raise KeyboardInterrupt


def listen_early() -> None:
    """End this process in one sentence, should it be told to, while a command of ours is still being imported.

    An exception would be raised inside whatever module is being imported, which may print or swallow it. Nothing where
    Python was started for something else that happens to import kvbench.
    """
    if _starts_a_command():
        for number in SIGNALS:
            if signal.getsignal(number) in UNTOUCHED:
                signal.signal(number, _leave)


def _starts_a_command() -> bool:
    """Whether this is `python -m kvbench...`, which looks for its module, or the script `lm_eval`."""
    given = sys.orig_argv
    ours = any(flag == "-m" and name.split(".")[0] == "kvbench" for flag, name in pairwise(given))
    return (sys.argv[:1] == ["-m"] and ours) or os.path.basename(sys.argv[0] if sys.argv else "") == "lm_eval"


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, b"kvbench: interrupted\n")
    os._exit(128 + number)
