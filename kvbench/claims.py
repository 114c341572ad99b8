"""`kvbench claims`: claims of papers, decided from finished runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import yaml

from kvbench.config.completion import complete_overrides
from kvbench.config.compose import check_run_fields
from kvbench.errors import counted
from kvbench.papers.claims import PAPERS, Verdict, decide, read_claims
from kvbench.report.formats import FORMATS, show
from kvbench.report.text_table import TextTable, table_of
from kvbench.results.loading import load_results
from kvbench.results.statistics import between
from kvbench.terminal.command import PATH, Command, leave, log_to_stderr, pairs, program
from kvbench.terminal.outputs import check_output


@click.command("claims", cls=Command)
@click.argument("overrides", nargs=-1, metavar="[FIELD=VALUE]...", shell_complete=complete_overrides)
@click.option("--paper", multiple=True, help=f"One of {', '.join(PAPERS)}, or a YAML file of claims; repeatable.")
@click.option("--runs", type=PATH, help="Folder of finished runs; without it, the commands of the runs are shown.")
@click.option("-o", "--output", type=PATH, help=f"File to write: {', '.join(FORMATS)}.")
def cli(overrides: Sequence[str], paper: Sequence[str], runs: Path | None, output: Path | None) -> None:
    """Decide claims of papers from finished runs: kvbench claims --runs results/runs.

    FIELD=VALUE: replace fields of the runs, such as model=pocket task=niah budget=64.
    """
    log_to_stderr()
    if output is not None:
        check_output(output, tuple(FORMATS))
    words = pairs(overrides, "model=pocket")
    check_run_fields(words)
    budget = {"budget": f"[{words['budget']}]"} if "budget" in words else {}
    fields = {key: yaml.safe_load(value) for key, value in {**words, **budget}.items()}
    claims = [claim for name in paper or PAPERS for claim in read_claims(name, fields)]
    found = [] if runs is None else load_results(runs)
    show(as_table([decide(claim, found) for claim in claims]), output, counted(len(claims), "claim"))


main = program(cli)


def as_table(verdicts: Sequence[Verdict]) -> TextTable:
    """One row per comparison, or per claim without comparisons."""
    rows = []
    for one in verdicts:
        first = [one.claim.name, f"{one.claim.claim} ({one.claim.source})", one.verdict]
        for found in one.comparisons:
            d = found.difference
            need = f", needs {found.gain:+g}" if found.gain else ""
            rows.append([*first, f"{found.where}{need}", f"{d.mean:+.3f}", between(d.low, d.high, "+.3f"), str(d.n)])
        if not one.comparisons:
            rows.append([*first, "", "", "", ""])
    columns = ["name", "claim", "verdict", "comparison", "difference", "95% interval", "n"]
    notes = [f"{one.claim.name}: {remark}" for one in verdicts for remark in one.remarks]
    return table_of(columns, rows, counted(len(verdicts), "claim"), left=columns[:4], notes=notes, groups=["name"])


if __name__ == "__main__":
    leave(main())
