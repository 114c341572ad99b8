"""Scores recorded predictions: `kvbench score`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from kvbench.errors import UsageError, counted, instead
from kvbench.results.files import write_atomically
from kvbench.tasks.predictions import Line
from kvbench.tasks.scores import benchmark_module, benchmarks_with
from kvbench.terminal.command import PATH, Command, program
from kvbench.terminal.outputs import check_output, writing

_ABOUT = """Score recorded predictions: kvbench score longbench predictions.jsonl -o scored.jsonl.

Each line is a JSON object: one prediction, or the predictions of a whole task. Every line is copied with `score` as the
official code prints it; an old `score` is replaced. Your own benchmark is given by its module (`my_package.my_bench`),
which has a function `score_predictions(line)`.
"""


def score_file(path: Path, output: Path | None, rate: Callable[[Line], Line]) -> int:
    """Score every line of a file, write them to `output` (None: stdout), and return their number.

    Raises UsageError with file and line of the first error; then `output` is unchanged.
    """
    scored = []
    for number, text in enumerate(_lines(path), start=1):
        try:
            line = json.loads(text)
            if not isinstance(line, dict):
                raise ValueError("must be a JSON object, with the fields of one prediction or task")
            scored.append(json.dumps({**line, **rate(line)}, ensure_ascii=False, allow_nan=False))
        except json.JSONDecodeError as error:
            raise UsageError(f"{path}, line {number}: not JSON, the file is damaged or cut off ({error})") from error
        except ValueError as error:
            raise UsageError(f"{path}, line {number}: {error}") from error
    if output is None:
        sys.stdout.write("\n".join(scored) + "\n")
        return len(scored)
    with writing(output):
        write_atomically(output, "\n".join(scored) + "\n")
    return len(scored)


class Benchmarks(click.Group):
    """The benchmarks that can score predictions, and any module of the user with this function."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of kvbench's benchmarks."""
        return list(benchmarks_with("predictions"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        """The command of a benchmark. Raises UsageError for a module that cannot score."""
        known = instead(cmd_name, self.list_commands(ctx), "; or a module with this function")
        try:
            benchmark = benchmark_module(cmd_name, "predictions")
        except (ModuleNotFoundError, ValueError, TypeError) as error:  # an empty name, or a leading dot
            raise UsageError(f"{cmd_name} is not a benchmark that can score predictions ({error}){known}") from error
        if not hasattr(benchmark, "score_predictions"):
            raise UsageError(f"{cmd_name} has no function score_predictions{known}")
        return _command_of(cmd_name, benchmark)


def _command_of(name: str, benchmark: ModuleType) -> click.Command:
    def score(predictions: Path, output: Path | None, **flags: Any) -> None:  # noqa: ANN401
        if output is not None:
            check_output(output)
        count = score_file(predictions, output, partial(benchmark.score_predictions, **flags))
        if output is not None:
            sys.stdout.write(f"{counted(count, 'line')} -> {output}\n")

    written = "File to write (default: stdout)."
    params: list[click.Parameter] = [
        click.Argument(["predictions"], type=PATH),
        click.Option(["-o", "--output"], type=PATH, help=written),
    ]
    for flag, text in getattr(benchmark, "FLAGS", {}).items():
        params.append(click.Option([f"--{flag.replace('_', '-')}", flag], is_flag=True, help=text))
    if judges := getattr(benchmark, "JUDGES", None):
        protocols = click.Choice(list(judges))
        params.append(
            click.Option(["--protocol"], type=protocols, default=judges[0], show_default=True, help="Scoring rules.")
        )
    fields = getattr(benchmark, "FIELDS", "see its documentation")
    return Command(name, params=params, callback=score, help=f"Fields of a line: {fields}.", short_help=fields)


cli = Benchmarks("score", help=_ABOUT, no_args_is_help=False)
main = program(cli)


def _lines(path: Path) -> list[str]:
    try:
        content = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        before = error.object[: error.start].count(b"\n")
        raise UsageError(f"{path}, line {before + 1}: not UTF-8 text") from error
    if not content.strip():
        raise UsageError(f"{path} is empty, it must have one JSON object per line")
    return content.removesuffix("\n").split("\n")
