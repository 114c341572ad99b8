"""The table at the end of a run or a sweep."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from kvbench.results import RunRecord
from kvbench.stats import paired_difference

BASELINE = "full"
_WIDTH = 200  # wider than any table of ours: where a terminal is narrower it folds lines, but no number is cut off


def print_table(runs: Sequence[RunRecord]) -> None:
    """Print one row per run on stdout: a run named twice (`full` at two budgets) is shown once."""
    unique = list({run.run_id: run for run in runs}.values())
    console = Console(file=sys.stdout, width=_WIDTH, highlight=False)
    with console.capture() as text:
        console.print(results_table(unique))
    lines = [line.rstrip() for line in text.get().splitlines()]
    sys.stdout.write("\n".join(lines) + "\n")
    if len(unique) == 1:
        sys.stdout.write(f"results: {unique[0].folder}\n")


def results_table(runs: Sequence[RunRecord]) -> Table:
    """Score with its 95% interval, tokens and bytes really held, and seconds; all are means per example."""
    baselines = {_key(run): run for run in reversed(runs) if run.names["policy"] == BASELINE}
    compares = any(_key(run) in baselines and run.names["policy"] != BASELINE for run in runs)
    models = {run.names["model"] for run in runs}
    table = Table(title=None if len(models) > 1 else f"model: {models.copy().pop()}", title_justify="left", box=None)
    left = ["policy", "task"] if len(models) == 1 else ["model", "policy", "task"]
    for name in left:
        table.add_column(name, no_wrap=True)
    numbers = ["budget", "n", "score (95% CI)", *(["vs full (95% CI)"] if compares else [])]
    for name in [*numbers, "kept/KV head", "cache MiB", "of full", "prefill s", "decode s"]:
        table.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        against = [_against(run, baselines.get(_key(run)))] if compares else []
        table.add_row(*(run.names[name] for name in left), *_first(run), *against, *_held(run))
    return table


def _key(run: RunRecord) -> tuple[str, ...]:
    """What two runs must share to be compared example by example."""
    identity = run.identity
    return tuple(str(identity[name]) for name in ("model", "dtype", "task", "seed", "generation"))


def _first(run: RunRecord) -> list[str]:
    numbers = run.metrics
    budget = "-" if run.identity["budget"] is None else str(run.identity["budget"])
    return [budget, str(numbers["n"]), _score(run)]


def _score(run: RunRecord) -> str:
    numbers = run.metrics
    if numbers["score"] is None:
        return f"none: {numbers['n_failed']} failed"
    return f"{numbers['score']:.3f} ({numbers['score_low']:.2f}-{numbers['score_high']:.2f})"


def _against(run: RunRecord, baseline: RunRecord | None) -> str:
    """Mean difference to the baseline over the examples both have; "*" where its interval leaves out zero."""
    if baseline is None or run is baseline or run.metrics["score"] is None or baseline.metrics["score"] is None:
        return ""
    pairs = [
        (theirs.score, ours.score)
        for theirs, ours in zip(baseline.samples, run.samples, strict=False)
        if theirs.score is not None and ours.score is not None and theirs.prompt_hash == ours.prompt_hash
    ]
    if not pairs:
        return ""
    difference = paired_difference([first for first, _ in pairs], [second for _, second in pairs])
    star = "*" if difference.low > 0 or difference.high < 0 else " "
    return f"{difference.mean:+.3f} ({difference.low:+.2f}..{difference.high:+.2f}){star}"


def _held(run: RunRecord) -> list[str]:
    numbers = run.metrics
    mib = None if numbers["cache_bytes"] is None else numbers["cache_bytes"] / 2**20
    share = None if numbers["cache_share"] is None else 100 * numbers["cache_share"]
    seconds = [_number(numbers["prefill_seconds"], ".3f"), _number(numbers["decode_seconds"], ".3f")]
    return [_number(numbers["kept_tokens"], ".1f"), _number(mib, ".3f"), _number(share, ".1f", "%"), *seconds]


def _number(value: float | None, how: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{how}}{unit}"
