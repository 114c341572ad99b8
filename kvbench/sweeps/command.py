"""The command line of `python -m kvbench.sweep`: follow, stop or continue the sweep in a folder."""

from __future__ import annotations

import argparse
import os
import signal
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from kvbench.records.definition import read_definition
from kvbench.sweeps.leaving import listen
from kvbench.sweeps.outcome import explain
from kvbench.terminal.command import Parser, command
from kvbench.terminal.console import log_to_stderr, quiet, share_cores


@partial(command, explains=explain)
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    log_to_stderr()
    return _run(_parser().parse_args(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = Parser("python -m kvbench.sweep", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command", metavar="status|wait|cancel|resume|forget")
    help_of = {
        "status": "how far every cell is",
        "wait": "wait until nothing is queued or running, then print the table",
        "cancel": "end its jobs and processes; finished examples are kept",
        "resume": "launch again what is left, and examples that ran out of memory",
        "forget": "take cells out of the sweep that failed and can stay so, such as mistyped ones",
    }
    others = [commands.add_parser(name, help=text, description=text) for name, text in help_of.items()]
    work = commands.add_parser("work", description="Compute one share of a sweep: what workers and jobs run.")
    work.add_argument("--share", required=True, help="name of the share")
    work.add_argument("--log", help="where the output of this process goes")
    work.add_argument("--requeue", action="store_true", help="go back to the queue when SLURM wants the node back")
    work.add_argument("--with-parent", action="store_true", help="end when stdin is closed")
    for one in (*others, work):
        one.add_argument("folder", type=Path, help="folder of the results, `out` of the sweep")
    resume, forget = others[-2:]
    resume.add_argument("fields", nargs="*", help="fields of the launcher to set anew: launcher.timeout_min=600")
    resume.add_argument("--failed", action="store_true", help="compute all failed examples again")
    words = "what their titles say, as status shows it: policy=snapkv budget=16; none: all that failed"
    forget.add_argument("words", nargs="*", help=words)
    return parser


def _run(asked: argparse.Namespace) -> int:
    if asked.command == "work":
        return _work(asked)
    from kvbench.sweeps import follow
    from kvbench.sweeps.status import print_status, statuses

    definition = read_definition(asked.folder)
    if asked.command == "status":
        print_status(statuses(asked.folder, definition))
        return 0
    if asked.command == "wait":
        return follow.wait_for(asked.folder, definition.cells)
    if asked.command == "cancel":
        return follow.cancel(asked.folder)
    if asked.command == "forget":
        return follow.forget(asked.folder, asked.words)
    return follow.resume(asked.folder, asked.fields, asked.failed)


def _work(asked: argparse.Namespace) -> int:
    listen()
    if asked.with_parent:
        threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    share_cores()
    quiet()
    from kvbench.sweeps.work import work

    return work(asked.folder, asked.share, asked.log, asked.requeue)


def _end_with_parent() -> None:
    """Stop this process, in order, once the one at the other end of its stdin is gone."""
    while os.read(0, 1):  # not through sys.stdin, whose lock would be held when the interpreter ends
        pass
    os.kill(os.getpid(), signal.SIGTERM)
