"""The frame of every command: error messages, exit codes, signals, arguments and logging."""

from __future__ import annotations

import atexit
import gc
import io
import logging
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click

from kvbench import __version__
from kvbench.errors import UsageError, one_line
from kvbench.terminal import start
from kvbench.terminal.escapes import visible


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


class _Visible(logging.Formatter):
    """Log lines; what files of others contain does not control the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record), "\n\t")


def log_to_stderr() -> None:
    """Log warnings to stderr; on a terminal, also information."""
    level = logging.INFO if sys.stderr.isatty() else logging.WARNING
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Visible("kvbench: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("kvbench").setLevel(level)


def import_models() -> None:
    """Import torch and transformers' models, which every run needs; none of their 100,000s of objects is garbage.

    Ctrl-C ends the process meanwhile: an exception in a finalizer of theirs would be ignored.
    """
    gc.disable()
    try:
        with start.ending_at_interrupt():
            import_module("transformers.modeling_utils")
        gc.freeze()  # later collections do not visit them
    finally:
        gc.enable()


def leave(code: int) -> NoReturn:
    """End the process as Python does, except that it does not take modules apart, for which torch's need a second."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # its reader has closed the pipe
            stream.flush()
    os._exit(code)


def quiet() -> None:
    """Logging of a run: kvbench's log lines; progress bars of libraries only on a terminal."""
    import_models()
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
DEBUG = "HYDRA_FULL_ERROR"  # as in every application of Hydra


class Terminated(KeyboardInterrupt):
    """SIGTERM, handled like Ctrl-C except for the exit code."""


def write_message(message: str, error: BaseException | None = None) -> None:
    """Write a message to stderr, after the traceback of `error` if it is given."""
    if error is not None:
        traceback.print_exception(error, file=sys.stderr)
    sys.stderr.write("kvbench: " + visible(message, "\n\t") + "\n")


def command(main: Callable[..., int | None]) -> Callable[..., int]:
    """Wrap a command's `main(arguments)`: errors become one message and an exit code (1, 2, 130, 143)."""

    @wraps(main)
    def wrapped(arguments: Sequence[str] | None = None) -> int:
        replace_unencodable()
        try:
            with sigterm_as_interrupt():
                code = main(arguments)
                sys.stdout.flush()
                return code or 0
        except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
            close_pipe()
            return BROKEN_PIPE
        except (Exception, KeyboardInterrupt) as error:
            code, message = _explained(error)
            write_message(message, error if os.environ.get(DEBUG) else None)
            return code

    return wrapped


def close_pipe() -> None:
    """Write the rest of stdout nowhere: its reader has closed the pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _explained(error: BaseException) -> tuple[int, str]:
    """The exit code (for a signal 128 plus its number, as in shells) and the message for an error."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + (signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT), "interrupted"
    if isinstance(error, click.UsageError):
        path = error.ctx.command_path if error.ctx else "kvbench"
        return WRONG, f"{' '.join(error.format_message().split()).rstrip('.')} (see {path} --help)"
    if isinstance(error, UsageError):
        return WRONG, str(error)
    hint = "" if os.environ.get(DEBUG) else f" ({DEBUG}=1 shows where)"
    return FAILED, f"{one_line(error)}{hint}"


def program(cli: click.Command) -> Callable[..., int]:
    """The function `main(arguments)` of a sub-command; returns its exit code."""

    @command
    def main(arguments: Sequence[str] | None = None) -> int | None:
        words = list(sys.argv[1:] if arguments is None else arguments)
        if "--version" in words:
            sys.stdout.write(f"{our_version()}\n")
            return 0
        try:
            settings = {"help_option_names": ["-h", "--help"], **cli.context_settings}
            name = "kvbench" if cli.name == "kvbench" else f"kvbench {cli.name}"
            with cli.make_context(name, words, **settings) as context:
                code: int | None = cli.invoke(context)
                return code
        except click.exceptions.NoArgsIsHelpError as usage:
            sys.stdout.write(f"{usage.format_message()}\n")
            return 0
        except click.exceptions.Exit as end:  # after --help
            return end.exit_code

    return main


class Command(click.Command):
    """A sub-command of kvbench. An option that may be repeated also takes several values: `--by depth length`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Repeat the option before each of its values."""
        several = {name for one in self.params if isinstance(one, click.Option) and one.multiple for name in one.opts}
        words: list[str] = []
        option = ""
        for word in args:
            if word.startswith("-"):
                option = word if word in several else ""
            words += [option, word] if option and word != option and words[-1] != option else [word]
        return super().parse_args(ctx, words)


class Commands(click.Group):
    """A command with sub-commands, which are imported when they are used.

    places: of each sub-command its module with the name of its object, `kvbench.plot:cli`, and its summary.
    """

    def __init__(self, name: str, places: Mapping[str, tuple[str, str]], about: str) -> None:
        summaries = [click.Command(name, short_help=text) for name, (_, text) in places.items()]
        super().__init__(name, help=about, no_args_is_help=False, commands=summaries)
        self.places = places

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Import a sub-command."""
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None:
            module, _, member = self.places[name][0].partition(":")
            command = getattr(import_module(module), member)
        return name, command, rest


class PathType(click.Path):
    """A path; an empty text, which would be the working directory, is refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:  # noqa: ANN401
        """The path of an argument."""
        if not str(value).strip():
            self.fail(f"{value!r} is not a path", param, ctx)
        return Path(value)


PATH = PathType()


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

    default = signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_DFL, start.end)
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
