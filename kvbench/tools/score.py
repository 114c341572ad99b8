"""Scores recorded predictions: `python -m kvbench.score longbench predictions.jsonl -o scored.jsonl`.

Each line is a JSON object: one prediction, or the predictions of a whole task. Every line is copied with `score` as the
official code prints it; an old `score` is replaced. Your own benchmark is given by its module (`my_package.my_bench`),
which has a function `score_predictions(line)`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

from kvbench.errors import UsageError
from kvbench.results.files import write_atomically
from kvbench.tasks.predictions import Line
from kvbench.tasks.scores import benchmark_module, benchmarks_with
from kvbench.terminal.command import Parser, command
from kvbench.terminal.outputs import check_output


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
    try:
        write_atomically(output, "\n".join(scored) + "\n")
    except (OSError, UnicodeError) as error:
        raise UsageError(f"-o {output} cannot be written ({error})") from error
    return len(scored)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 0, or 2 for an error."""
    arguments = sys.argv[1:] if arguments is None else arguments
    benchmarks = _benchmarks(arguments)
    options = _parser(benchmarks).parse_args(arguments)
    if options.output is not None:
        check_output(options.output)
    benchmark = benchmarks[options.benchmark]
    flags = {flag: getattr(options, flag) for flag in (*_flags(benchmark), "protocol") if hasattr(options, flag)}
    count = score_file(options.predictions, options.output, partial(benchmark.score_predictions, **flags))
    if options.output is not None:
        sys.stdout.write(f"{count} lines -> {options.output}\n")
    return 0


def _benchmarks(arguments: Sequence[str]) -> dict[str, ModuleType]:
    """The benchmarks of kvbench by name, and a requested module. Raises UsageError if it cannot score."""
    found = {name: benchmark_module(name, "predictions") for name in benchmarks_with("predictions")}
    name = arguments[0] if arguments and not arguments[0].startswith("-") else None
    if name is not None and name not in found:
        known = f"choose one of {', '.join(found)}, or a module with this function"
        try:
            found[name] = benchmark_module(name, "predictions")
        except (ModuleNotFoundError, ValueError, TypeError) as error:  # an empty name, or a leading dot
            raise UsageError(f"{name} is not a benchmark that can score predictions ({error}): {known}") from error
        if not hasattr(found[name], "score_predictions"):
            raise UsageError(f"{name} has no function score_predictions: {known}")
    return found


def _parser(benchmarks: Mapping[str, ModuleType]) -> argparse.ArgumentParser:
    parser = Parser("python -m kvbench.score", description=__doc__)
    files = Parser("", add_help=False)
    files.add_argument("predictions", type=Path, help="file with one JSON object per line")
    files.add_argument("-o", "--output", type=Path, help="file to write (default: stdout)")
    commands = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, benchmark in benchmarks.items():
        fields = getattr(benchmark, "FIELDS", "see its documentation")
        about = f"Fields of a line: {fields}."
        one = commands.add_parser(name, parents=[files], help=fields, description=about)
        for flag, text in _flags(benchmark).items():
            one.add_argument(f"--{flag.replace('_', '-')}", action="store_true", help=text)
        if judges := getattr(benchmark, "JUDGES", None):
            one.add_argument(
                "--protocol", choices=judges, default=judges[0], help="scoring rules (default: %(default)s)"
            )
    return parser


def _flags(benchmark: ModuleType) -> Mapping[str, str]:
    flags: Mapping[str, str] = getattr(benchmark, "FLAGS", {})
    return flags


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
