"""What the papers claim, beside the numbers they print and beside our runs: `python -m kvbench.claims`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from kvbench.analysis.load import load_results
from kvbench.analysis.result import Result
from kvbench.papers.claims.inference import judge_print
from kvbench.papers.claims.measured import judge_runs
from kvbench.papers.claims.read import claims_of
from kvbench.papers.claims.show import Judged, as_csv, as_json, markdown, table
from kvbench.terminal.command import Parser, command
from kvbench.terminal.errors import UsageError
from kvbench.terminal.outputs import check_output

PAPERS = ("caote", "cake", "kvec", "d2o", "ott", "today")
WRITERS: dict[str, Callable[[Sequence[Judged]], str]] = {".md": markdown, ".csv": as_csv, ".json": as_json}
_WIDTH = 170  # where the output is no terminal


def judge(
    papers: Sequence[str] = PAPERS, runs: Sequence[Result] | None = None, any_budget: bool = False
) -> list[Judged]:
    """All claims of the papers on the published numbers and, where runs are given, on these.

    any_budget: runs count at every budget and not only at those of the claim, as for a model with shorter prompts.
    """
    printed = [(claim, judge_print(claim)) for paper in papers for claim in claims_of(paper)]
    measured = [None] * len(printed) if runs is None else judge_runs(printed, runs, any_budget)
    return [Judged(claim, found, own) for (claim, found), own in zip(printed, measured, strict=True)]


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code, 2 for a wrong value, said in one sentence."""
    parser = Parser("python -m kvbench.claims", description=__doc__)
    parser.add_argument("--paper", choices=PAPERS, action="append", help="only this one's; may be given again")
    parser.add_argument("--runs", type=Path, help="folder of finished runs to judge by too, such as results/runs")
    parser.add_argument(
        "--any-budget",
        action="store_true",
        help="runs count at any budget, not only at the claim's (for a model with shorter prompts, such as pocket)",
    )
    parser.add_argument("-o", "--output", type=Path, help=f"file to write instead: {', '.join(WRITERS)}")
    asked = parser.parse_args(arguments)
    logging.basicConfig(format="kvbench: %(message)s", stream=sys.stderr)
    if asked.output is not None:
        check_output(asked.output, tuple(WRITERS))
    if asked.any_budget and asked.runs is None:
        raise UsageError("--any-budget has no effect without --runs, of which it says what counts")
    runs = None if asked.runs is None else load_results(asked.runs)
    judged = judge(list(dict.fromkeys(asked.paper or PAPERS)), runs, asked.any_budget)
    if asked.output is None:
        console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False, markup=False)
        console.print(table(judged))
    else:
        _write(asked.output, WRITERS[asked.output.suffix](judged))
        sys.stdout.write(f"{len(judged)} claims -> {asked.output}\n")
    return 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"-o {path} cannot be written ({error.strerror or error})") from error


if __name__ == "__main__":
    sys.exit(main())
