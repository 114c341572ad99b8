"""Ctrl-C while a command imports its modules, which takes seconds. Imported first, so it imports little itself."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


def end_at_interrupt() -> None:
    """Until a command handles Ctrl-C itself, let it end the process with one line instead of a traceback."""
    main_thread = threading.current_thread() is threading.main_thread()
    if main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end)


@contextmanager
def ending_at_interrupt() -> Iterator[None]:
    """Let Ctrl-C end the process inside this context, unless it is ignored or in another thread."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before == signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def end(number: int, frame: FrameType | None) -> None:
    """The handler of SIGINT. An exception could be caught or reported by a module that is half imported."""
    os.write(2, b"kvbench: interrupted\n")
    os._exit(128 + number)


def is_command() -> bool:
    """Whether this process is the command `kvbench` or `python -m kvbench.NAME`, which imports its package first."""
    started = sys.argv[0] if sys.argv else ""
    is_module = started == "-m" and any(word.partition(".")[0] == "kvbench" for word in sys.orig_argv)
    return is_module or os.path.basename(started) == "kvbench"
