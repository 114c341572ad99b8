"""What every command does alike: one sentence on stderr for whatever goes wrong, an exit code, --version."""

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

from kvbench.terminal.console import write_what_can_be
from kvbench.terminal.errors import UsageError
from kvbench.terminal.folding import fold, help_width
from kvbench.terminal.signals import exit_code, sigterm_as_interrupt

FAILED, WRONG, BROKEN_PIPE = 1, 2, 141
DEBUG = "KVBENCH_DEBUG"


class Main(Protocol):
    """What a command's module has."""

    def __call__(self, arguments: Sequence[str] | None = None) -> int:
        """Run the command line and return its exit code."""
        ...


Explain: TypeAlias = Callable[[BaseException], tuple[int, str]]
"""The exit code and the one sentence for an error."""


def explain(error: BaseException, shows: str = f"{DEBUG}=1") -> tuple[int, str]:
    """The exit code and the one sentence for an error. shows: what shows where one came from that is not the user's."""
    if isinstance(error, KeyboardInterrupt):
        return exit_code(error), "interrupted"
    if isinstance(error, UsageError):
        return WRONG, str(error)
    first = (str(error).strip().splitlines() or ["no message"])[0]
    return FAILED, f"{type(error).__name__}: {first} ({shows} shows where)"


def say(sentence: str, error: BaseException | None = None) -> None:
    """One sentence on stderr, after the traceback of `error` where one is asked for."""
    if error is not None:
        traceback.print_exception(error, file=sys.stderr)
    sys.stderr.write(f"kvbench: {sentence}\n")


def command(main: Main, explains: Explain = explain) -> Main:
    """A command's `main`, whose errors become one sentence and an exit code: 1 failed, 2 a wrong value, 130, 143."""

    @wraps(main)
    def answering(arguments: Sequence[str] | None = None) -> int:
        write_what_can_be()
        try:
            with sigterm_as_interrupt():
                code = main(arguments)
                sys.stdout.flush()
                return code
        except BrokenPipeError:  # the reader, such as `head`, has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return BROKEN_PIPE
        except (Exception, KeyboardInterrupt) as error:
            code, sentence = explains(error)
            say(sentence, error if _debugs() else None)
            return code

    return answering


def _debugs() -> bool:
    return bool(os.environ.get(DEBUG))


class _Help(argparse.HelpFormatter):
    """Help in the width of the terminal, whose paragraphs and columns are those of the text."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=help_width())

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return fold(text, width)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return fold(text, width).splitlines()


class Parser(argparse.ArgumentParser):
    """A command's flags: a wrong one raises UsageError, and --version is there."""

    def __init__(self, prog: str, **fields: Any) -> None:  # noqa: ANN401 - as argparse has them
        super().__init__(prog, **{"formatter_class": _Help, **fields})
        self.register("type", Path, _path)
        if self.add_help:
            self.add_argument("--version", action="version", version=our_version(), help=argparse.SUPPRESS)

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(f"{message} ({self.prog} --help says what is allowed)")


def _path(text: str) -> Path:
    """No text would name the folder one works in."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is no path")
    return Path(text)


def our_version() -> str:
    """What --version says."""
    return f"kvbench {version('kvbench')}"


def pairs(arguments: Sequence[str], example: str) -> dict[str, str]:
    """The fields that `key=value` arguments give. UsageError for another form, and for a field with two values."""
    found: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or not key:
            raise UsageError(f"{argument} cannot be read: write key=value, such as {example}")
        once(found, key, argument)
        found[key] = value
    return found


def once(given: dict[str, Any], key: str, argument: str) -> None:
    """Raise UsageError where a field has a value already: the last of two would win in silence."""
    if key in given:
        raise UsageError(f"{argument}: {key} is given twice, give it one value")
