"""The command line of `python -m kvbench.sweep`: follow, stop or continue the sweep in a folder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from kvbench.sweeps.outcome import explain, say
from kvbench.sweeps.signals import end_with_parent, sigterm_as_interrupt
from kvbench.terminal.console import log_to_stderr, quiet, share_cores


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    asked = _parser().parse_args(arguments)
    log_to_stderr()
    try:
        with sigterm_as_interrupt():
            return _run(asked)
    except (Exception, KeyboardInterrupt) as error:
        code, sentence = explain(error)
        say(sentence)
        return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kvbench.sweep", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command", metavar="status|wait|cancel|resume")
    work = commands.add_parser("work", description="Compute one share of a sweep: what workers and jobs run.")
    work.add_argument("--share", required=True, help="name of the share")
    work.add_argument("--log", help="where the output of this process goes")
    work.add_argument("--with-parent", action="store_true", help="end when stdin is closed")
    for command in (work,):
        command.add_argument("folder", type=Path, help="folder of the results, `out` of the sweep")
    return parser


def _run(asked: argparse.Namespace) -> int:
    if asked.command == "work":
        return _work(asked)
    raise AssertionError(asked.command)


def _work(asked: argparse.Namespace) -> int:
    if asked.with_parent:
        end_with_parent()
    share_cores()
    quiet()
    from kvbench.sweeps.work import work

    return work(asked.folder, asked.share, asked.log)
