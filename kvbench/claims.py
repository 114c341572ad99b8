"""Decides claims of papers from finished runs: `python -m kvbench.claims --runs results/runs`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import yaml

from kvbench.papers.claims import PAPERS, Verdict, decide, read_claims
from kvbench.report.formats import FORMATS, write
from kvbench.report.table import Table, text
from kvbench.results.result import load_results
from kvbench.terminal.command import Parser, command, log_to_stderr, pairs, terminal_width
from kvbench.terminal.outputs import check_output


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code, 2 for a wrong value."""
    parser = Parser("python -m kvbench.claims", description=__doc__)
    parser.add_argument(
        "--paper", action="append", help=f"one of {', '.join(PAPERS)}, or a YAML file of claims; repeatable"
    )
    parser.add_argument(
        "--runs",
        type=Path,
        help="folder of finished runs; without it, the claims and the commands of their runs are shown",
    )
    parser.add_argument("-o", "--output", type=Path, help=f"file to write: {', '.join(FORMATS)}")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="replace fields of the runs: model=pocket task=niah budget=64"
    )
    options, rest = parser.parse_known_args(arguments)
    if any("=" not in word or word[0] == "-" for word in rest):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    log_to_stderr()
    if options.output is not None:
        check_output(options.output, tuple(FORMATS))
    words = pairs([*options.overrides, *rest], "model=pocket")
    budget = {"budget": f"[{words['budget']}]"} if "budget" in words else {}
    overrides = {key: yaml.safe_load(value) for key, value in {**words, **budget}.items()}
    claims = [claim for paper in options.paper or PAPERS for claim in read_claims(paper, overrides)]
    runs = [] if options.runs is None else load_results(options.runs)
    table = as_table([decide(claim, runs) for claim in claims])
    if options.output is None:
        sys.stdout.write(text(table, terminal_width()))
    else:
        write(table, options.output)
        sys.stdout.write(f"{len(claims)} claims -> {options.output}\n")
    return 0


def as_table(verdicts: Sequence[Verdict]) -> Table:
    """One row per comparison, or per claim without comparisons."""
    rows = []
    for one in verdicts:
        first = [one.claim.name, f"{one.claim.claim} ({one.claim.source})", one.verdict]
        for found in one.comparisons:
            d = found.difference
            need = f", needs {found.gain:+g}" if found.gain else ""
            rows.append([*first, f"{found.where}{need}", f"{d.mean:+.3f}", f"{d.low:+.3f} to {d.high:+.3f}", str(d.n)])
        if not one.comparisons:
            rows.append([*first, "", "", "", ""])
    columns = ["name", "claim", "verdict", "comparison", "difference", "95% interval", "n"]
    notes = [f"{one.claim.name}: {remark}" for one in verdicts for remark in one.remarks]
    frame = pd.DataFrame(rows, columns=columns)
    return Table(frame, f"{len(verdicts)} claims", notes, left=columns[:4], groups=["name"])


if __name__ == "__main__":
    sys.exit(main())
