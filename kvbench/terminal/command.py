"""The frame of every command: error messages, exit codes, signals, arguments, logging, progress bars."""

from __future__ import annotations

import argparse
import io
import logging
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol, TypeVar

from kvbench import __version__
from kvbench.errors import UsageError


def replace_unencodable() -> None:
    """Write a question mark to stdout and stderr for characters that their encoding does not have."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def share_cores() -> None:
    """Let torch's waiting threads spin for microseconds, then sleep. OpenMP reads this once, when torch is imported.

    By default they spin for milliseconds. On a busy machine, each of the many small steps of a small model then waits
    for a whole time slice: prefill takes 15.9 s instead of 0.5 s (pocket model, 2,048 tokens, 2 cores, a load of 8).
    Threads that never spin must be woken for each step, which doubles the decoding time on a quiet machine.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def log_to_stderr() -> None:
    """Log warnings to stderr; on a terminal, also information."""
    level = logging.INFO if sys.stderr.isatty() else logging.WARNING
    logging.basicConfig(format="kvbench: %(message)s", level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("kvbench").setLevel(level)


def quiet() -> None:
    """Logging of a run: kvbench's log lines; progress bars of libraries only on a terminal."""
    from huggingface_hub.utils.tqdm import disable_progress_bars
    from transformers.utils.logging import disable_progress_bar

    log_to_stderr()
    if not sys.stderr.isatty():
        disable_progress_bars()
        disable_progress_bar()


def terminal_width() -> int | None:
    """Characters per line if stdout is a terminal, otherwise None."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


FAILED, WRONG, BROKEN_PIPE = 1, 2, 141
DEBUG = "KVBENCH_DEBUG"
LINE_SECONDS = 60.0  # between two lines of a progress bar in a log file


class Terminated(KeyboardInterrupt):
    """SIGTERM, handled like Ctrl-C except for the exit code."""


def write_message(message: str, error: BaseException | None = None) -> None:
    """Write a message to stderr, after the traceback of `error` if it is given."""
    if error is not None:
        traceback.print_exception(error, file=sys.stderr)
    sys.stderr.write(f"kvbench: {message}\n")


def command(main: Callable[..., int]) -> Callable[..., int]:
    """Wrap a command's `main(arguments)`: errors become one message and an exit code (1, 2, 130, 143)."""

    @wraps(main)
    def wrapped(arguments: Sequence[str] | None = None) -> int:
        replace_unencodable()
        try:
            with sigterm_as_interrupt():
                code = main(arguments)
                sys.stdout.flush()
                return code
        except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return BROKEN_PIPE
        except (Exception, KeyboardInterrupt) as error:
            code, message = _explained(error)
            write_message(message, error if os.environ.get(DEBUG) else None)
            return code

    return wrapped


def _explained(error: BaseException) -> tuple[int, str]:
    """The exit code (for a signal 128 plus its number, as in shells) and the message for an error."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + (signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT), "interrupted"
    if isinstance(error, UsageError):
        return WRONG, str(error)
    first = (str(error).strip().splitlines() or ["no message"])[0]
    return FAILED, f"{type(error).__name__}: {first} ({DEBUG}=1 shows where)"


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """SIGINT and SIGTERM raise KeyboardInterrupt inside this context, so that finished work is kept and reported.

    KeyboardInterrupt is raised even if a library turned it into another error, as transformers does during imports.
    Handlers of others are kept, and so is SIGINT where it is ignored, as in background jobs of a shell.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[KeyboardInterrupt] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        received.append(Terminated() if number == signal.SIGTERM else KeyboardInterrupt())
        raise received[-1]

    default = signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_DFL)
    signals = [signal.SIGTERM, *[signal.SIGINT] * default]
    before = {number: signal.signal(number, interrupt) for number in signals}
    try:
        yield
    except Exception as error:
        if received:
            raise received[0] from error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Parser(argparse.ArgumentParser):
    """Parses a command's flags, with --version; a wrong flag raises UsageError."""

    def __init__(self, prog: str, **fields: Any) -> None:  # noqa: ANN401 - arguments of argparse
        super().__init__(prog, **{"formatter_class": argparse.RawDescriptionHelpFormatter, **fields})
        self.register("type", Path, _path)
        if self.add_help:
            self.add_argument("--version", action="version", version=our_version(), help=argparse.SUPPRESS)

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(f"{message} (see {self.prog} --help)")


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add --trust: modules of the user whose classes and functions files of results may name."""
    loads = "load classes and functions of these modules where results name them; this runs their code"
    parser.add_argument("--trust", nargs="+", default=[], metavar="MODULE", help=loads)


def _path(text: str) -> Path:
    """A path; an empty text, which would be the working directory, is refused."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is not a path")
    return Path(text)


def our_version() -> str:
    """The output of --version."""
    return f"kvbench {__version__}"


def pairs(arguments: Sequence[str], example: str) -> dict[str, str]:
    """The fields of `key=value` arguments. UsageError for another format, and for a field with two values."""
    found: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or not key:
            raise UsageError(f"{argument} cannot be read: write key=value, such as {example}")
        if key in found:
            raise UsageError(f"{argument}: {key} is given twice, give it one value")
        found[key] = value
    return found


Item = TypeVar("Item")


class Advance(Protocol):
    """Advances a bar by a number of units. note: text after the bar until the next note. total: the end, once known."""

    def __call__(self, units: int, note: str | None = None, total: int | None = None) -> None: ...


def progress(items: Iterable[Item], title: str, total: int | None = None, done: int = 0) -> Iterator[Item]:
    """Yield `items` with a progress bar on stderr. total: number of items; done: number of items finished before."""
    with meter(title, total, done) as advance:
        for item in items:
            yield item
            advance(1)


@contextmanager
def meter(title: str, total: int | None = None, done: int = 0, unit: str = "") -> Iterator[Advance]:
    """A bar on stderr or in a notebook, and the function that advances it from `done` towards `total`.

    unit: the counted units, in the plural ("tokens").
    """
    from tqdm.auto import tqdm  # imports asyncio and more, which `--help` need not wait for

    shown = "ipykernel" in sys.modules or sys.stderr.isatty()
    bar = tqdm(desc=title, total=total, initial=done, unit=f" {unit}" if unit else "it", leave=False,
               dynamic_ncols=True, disable=not shown)  # fmt: skip
    began = written = time.monotonic()
    count, behind = done, ""

    def advance(units: int, note: str | None = None, total: int | None = None) -> None:
        nonlocal count, behind, written
        count += units
        bar.total = bar.total if total is None else total
        bar.update(units)
        behind = behind if note is None else note
        if note is not None:
            bar.set_postfix_str(note)
        now = time.monotonic()
        if shown or now - written < LINE_SECONDS:
            return
        written = now
        of = "" if bar.total is None else f" of {bar.total}"
        left = ""
        if bar.total is not None and count > done:  # at the average speed so far
            seconds = (now - began) * max(0, bar.total - count) / (count - done)
            left = f"{tqdm.format_interval(seconds)} left"
        notes = ", ".join(filter(None, [left, behind]))
        line = f"{title}: {count}{of}{f' {unit}' if unit else ''}{f' ({notes})' if notes else ''}"
        sys.stderr.write(f"kvbench: {line}\n")
        sys.stderr.flush()

    with bar:
        yield advance
