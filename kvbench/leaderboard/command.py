"""Leaderboards: hold a submission against its own samples, and write the page of those that hold.

A submission is a folder of finished runs of an experiment: `python -m kvbench experiment=leaderboard/pocket out=mine`.
Beside them a file submission.yaml may say `experiment:` and `submitter:`.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from kvbench.terminal.command import FAILED, Parser, command, pairs, say
from kvbench.terminal.console import quiet
from kvbench.terminal.errors import UsageError
from kvbench.terminal.outputs import check_folder

MOST = 20  # sentences that are told of one submission


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 0, 1 where a submission is refused, 2 for what was asked wrongly."""
    asked = _parser().parse_args(arguments)
    logging.basicConfig(format="kvbench: %(message)s", stream=sys.stderr)
    if asked.command == "build":
        check_folder(asked.output, True, f"-o {asked.output}")
    from kvbench.leaderboard.asked import read_submission  # here: seconds of torch, which --help need not wait for
    from kvbench.leaderboard.board import boards
    from kvbench.leaderboard.check import Checker
    from kvbench.leaderboard.site import PAGE, write_site

    quiet()
    given = {key: None if value == "null" else value for key, value in pairs(asked.given, "task.data_dir=/x").items()}
    submissions = [read_submission(folder, asked.experiment, asked.submitter) for folder in asked.folders]
    if len({one.name for one in submissions}) < len(submissions):
        raise UsageError("two submissions have folders of the same name, which is theirs on the page: rename one")
    checkers = [Checker(one, given, asked.again) for one in submissions]
    refused = [checker for checker in checkers if not _holds(checker)]
    if refused:
        return FAILED
    if asked.command == "build":
        runs = [(checker.submission, run) for checker in checkers for run in checker.named]
        write_site(asked.output, boards(runs), runs)
        sys.stdout.write(f"leaderboard: {asked.output / PAGE}\n")
    return 0


def _holds(checker: object) -> bool:
    from kvbench.leaderboard.check import Checker

    assert isinstance(checker, Checker)
    one, refusals = checker.submission, checker.refusals()
    for sentence in refusals[:MOST]:
        say(sentence)
    if refusals:
        more = f", {len(refusals) - MOST} of them not told" if len(refusals) > MOST else ""
        say(f"{one.folder} is refused by {one.experiment}: {len(refusals)} objections{more}")
    else:
        sys.stdout.write(f"{one.folder} holds: {len(checker.runs)} runs of {one.experiment}\n")
    return not refusals


def _parser() -> argparse.ArgumentParser:
    parser = Parser("python -m kvbench.leaderboard", description=__doc__)
    shared = Parser("", add_help=False)
    shared.add_argument("--experiment", metavar="NAME", help="such as leaderboard/pocket, where no file says so")
    shared.add_argument("--submitter", default="", help="who ran it, where no file says so")
    shared.add_argument(
        "--again", type=int, default=0, metavar="N", help="compute the first N examples of all runs anew"
    )
    shared.add_argument("--set", action="append", default=[], dest="given", metavar="FIELD=VALUE",
                        help="a field that is otherwise on this machine: task.data_dir=, model.path=")  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True, metavar="check|build")
    check = commands.add_parser("check", parents=[shared], help="verify a submission from its samples alone")
    check.add_argument("folders", nargs=1, type=Path, metavar="FOLDER")
    build = commands.add_parser("build", parents=[shared], help="check submissions and write their page")
    build.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    build.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER", help="folder of the page")
    return parser
