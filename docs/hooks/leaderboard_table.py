"""The pocket leaderboard as a table, made of `results/leaderboard/leaderboard.csv`."""

from __future__ import annotations

import csv
from pathlib import Path

from md import table

FILE = Path(__file__).parents[2] / "results" / "leaderboard" / "leaderboard.csv"
PLACES = {"best": "**best**", "tied": "≈&nbsp;best", "worse": "", "": "reference"}


def leaderboard() -> str:
    """A row for each policy and budget, the best first."""
    rows = list(csv.DictReader(FILE.read_text(encoding="utf-8").splitlines()))
    tasks = list(dict.fromkeys(row["task"] for row in rows if row["task"] != "mean"))
    scores = {(row["policy"], row["budget"], row["task"]): f"{float(row['score']):.2f}" for row in rows}
    short = [f"{task.removeprefix('ruler_').partition('(')[0]}:" for task in tasks]
    columns = ("policy", "budget:", "mean:", "95% interval:", "KiB held:", "of full:", "", *short)
    shown = [
        (
            f"`{row['policy']}`",
            row["budget"] or "–",
            f"{float(row['score']):.2f}",
            f"{float(row['low']):.2f}&nbsp;to&nbsp;{float(row['high']):.2f}",
            f"{int(row['cache_bytes']) / 1024:,.0f}",
            f"{float(row['cache_share']):.1%}",
            PLACES[row["place"]],
            *(scores[row["policy"], row["budget"], task] for task in tasks),
        )
        for row in rows
        if row["task"] == "mean"
    ]
    return table(columns, shown)
