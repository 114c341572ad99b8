"""The command line of `python -m kvbench.results`: collect a table, draw curves, send runs to a dashboard."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from kvbench.report.collect import COLUMNS, FORMATS, collect
from kvbench.report.records import find_runs, labelled
from kvbench.report.trackers.wandb_settings import WandbSettings
from kvbench.terminal.command import Parser, command
from kvbench.terminal.errors import UsageError, refusing
from kvbench.terminal.outputs import check_output


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line of `python -m kvbench.results`; returns the exit code."""
    parser = Parser("python -m kvbench.results", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    collecting = commands.add_parser(
        "collect",
        help="write one tidy table of all finished runs below a folder",
        epilog="columns: " + "; ".join(f"{column.name} ({column.meaning})" for column in COLUMNS),
    )
    collecting.add_argument(
        "--by",
        nargs="+",
        default=[],
        metavar="KEY",
        help="add rows for each value of a key of the examples' metadata: task, length, depth, ...",
    )
    curve = commands.add_parser(
        "curve", help="draw NLL against context length of the runs below a folder that scored given texts"
    )
    for one, what in (
        (collecting, f"table to write: {', '.join(FORMATS)}"),
        (curve, "picture to write: .svg, .png, .pdf"),
    ):
        one.add_argument("folder", type=Path, help="where the runs are, such as results/runs")
        one.add_argument("-o", "--output", type=Path, required=True, help=what)
    _add_wandb(commands.add_parser("wandb", help="send the finished runs below a folder to Weights & Biases"))
    asked = parser.parse_args(arguments)
    logging.basicConfig(format="kvbench: %(message)s", stream=sys.stderr)
    if asked.command == "curve":
        done = f"{draw_curves(asked.folder, asked.output)} lines -> {asked.output}"
    elif asked.command == "wandb":
        done = send_to_wandb(asked)
    else:
        done = f"{collect(asked.folder, asked.output, asked.by)} rows -> {asked.output}"
    sys.stdout.write(f"{done}\n")
    return 0


def _add_wandb(command: argparse.ArgumentParser) -> None:
    command.add_argument("folder", type=Path, help="where the runs are, such as results/runs")
    command.add_argument("--sweep", help="what the runs are grouped by (default: the folder's name)")
    command.add_argument("--project", help="default: WANDB_PROJECT, or else kvbench")
    command.add_argument("--entity", help="default: WANDB_ENTITY, or else your own")
    command.add_argument(
        "--mode", help="online, or offline: files for `wandb sync` (default: WANDB_MODE, else offline)"
    )
    command.add_argument("--tags", nargs="+", default=[], help="added to WANDB_TAGS")


def send_to_wandb(asked: argparse.Namespace) -> str:
    """Send what W&B lacks of the runs below `asked.folder`, and say how many those were. Raises UsageError."""
    runs = find_runs(asked.folder)
    with refusing("wandb: "):
        place = os.environ.get("WANDB_DIR") or str(asked.folder)
        logger = WandbSettings(asked.project, asked.entity, asked.mode, asked.tags, place).resolved()
    if logger.mode == "disabled":
        raise UsageError("wandb: mode=disabled sends nothing, choose online or offline")
    import wandb  # here: it takes two seconds

    from kvbench.report.trackers.wandb_watch import WandbWatch

    try:
        sent = WandbWatch(logger, asked.sweep or asked.folder.resolve().name).send(runs)
    except (wandb.Error, OSError) as error:
        said = (str(error).strip().splitlines() or ["no message"])[0]
        raise UsageError(f"wandb: {type(error).__name__}: {said}; the same command sends what is left") from error
    where = logger.project if logger.mode == "online" else f"{place}/wandb (`wandb sync` uploads them)"
    return f"{sent} of {len(runs)} runs -> {where}"


def draw_curves(folder: Path, output: Path) -> int:
    """Draw the NLL curves of all finished runs below `folder` and return their number. Raises UsageError."""
    from kvbench.report.figures import nll, style  # here: matplotlib is a second, which only pictures have to wait for

    check_output(output, style.FORMATS)
    runs = nll.read_runs(labelled(find_runs(folder)))
    with refusing(f"{folder}: "), style.house_style():
        figure = nll.curves(runs)
        try:
            style.save(figure, output)
        except OSError as error:
            raise UsageError(f"-o {output} cannot be written ({error.strerror or error})") from error
    return len(runs)
