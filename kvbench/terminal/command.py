"""Shared behaviour of all commands: one error message on stderr, an exit code, --version."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeAlias

from kvbench.terminal.console import replace_unencodable
from kvbench.terminal.errors import UsageError
from kvbench.terminal.folding import fold, help_width
from kvbench.terminal.signals import exit_code, sigterm_as_interrupt

FAILED, WRONG, BROKEN_PIPE = 1, 2, 141
DEBUG = "KVBENCH_DEBUG"


class Main(Protocol):
    """The `main` function of a command."""

    def __call__(self, arguments: Sequence[str] | None = None) -> int:
        """Run the command line and return its exit code."""
        ...


Explain: TypeAlias = Callable[[BaseException], tuple[int, str]]
"""Returns the exit code and the message for an error."""


def explain(error: BaseException, shows: str = f"{DEBUG}=1") -> tuple[int, str]:
    """The exit code and the message for an error. shows: the setting that shows the traceback of an internal error."""
    if isinstance(error, KeyboardInterrupt):
        return exit_code(error), "interrupted"
    if isinstance(error, UsageError):
        return WRONG, str(error)
    first = (str(error).strip().splitlines() or ["no message"])[0]
    return FAILED, f"{type(error).__name__}: {first} ({shows} shows where)"


def write_message(message: str, error: BaseException | None = None) -> None:
    """Write a message to stderr, after the traceback of `error` if it is given."""
    if error is not None:
        traceback.print_exception(error, file=sys.stderr)
    sys.stderr.write(f"kvbench: {message}\n")


def command(main: Main, explains: Explain = explain) -> Main:
    """Wrap a command's `main`: errors become one message and an exit code (1 failed, 2 wrong value, 130, 143)."""

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
            code, message = explains(error)
            write_message(message, error if os.environ.get(DEBUG) else None)
            return code

    return wrapped


class _Help(argparse.HelpFormatter):
    """Help in the width of the terminal, with the paragraphs and columns of the text."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=help_width())

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return fold(text, width)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return fold(text, width).splitlines()


class Parser(argparse.ArgumentParser):
    """Parses a command's flags, with --version; a wrong flag raises UsageError."""

    def __init__(self, prog: str, **fields: Any) -> None:  # noqa: ANN401 - arguments of argparse
        super().__init__(prog, **{"formatter_class": _Help, **fields})
        self.register("type", Path, _path)
        if self.add_help:
            self.add_argument("--version", action="version", version=our_version(), help=argparse.SUPPRESS)

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(f"{message} (see {self.prog} --help)")


def _path(text: str) -> Path:
    """A path; an empty text, which would be the working directory, is refused."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is not a path")
    return Path(text)


def our_version() -> str:
    """The output of --version."""
    return f"kvbench {version('kvbench')}"


def pairs(arguments: Sequence[str], example: str) -> dict[str, str]:
    """The fields of `key=value` arguments. UsageError for another format, and for a field with two values."""
    found: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or not key:
            raise UsageError(f"{argument} cannot be read: write key=value, such as {example}")
        once(found, key, argument)
        found[key] = value
    return found


def once(given: dict[str, Any], key: str, argument: str) -> None:
    """Raise UsageError if a field already has a value, instead of silently using the last one."""
    if key in given:
        raise UsageError(f"{argument}: {key} is given twice, give it one value")
