"""How a process of ours is asked to stop: SIGTERM is Ctrl-C, and a worker ends with the process that started it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt meanwhile, so that finished work is kept and told as after Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def interrupt(number: int, frame: FrameType | None) -> None:
    """What a handler does."""
    raise KeyboardInterrupt


def end_with_parent() -> None:
    """Stop this process, in order, once the one at the other end of its stdin is gone."""

    def watch() -> None:
        while os.read(0, 1):  # not through sys.stdin, whose lock would be held when the interpreter ends
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent", daemon=True).start()
