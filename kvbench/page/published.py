"""Published numbers beside ours, for every table that some of the runs measure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvbench.analysis.result import Result
from kvbench.papers.compare import compare
from kvbench.papers.layout import HOLE, names, numbers, tables
from kvbench.report.frames import html


def beside_print(runs: Sequence[Result]) -> list[tuple[str, str]]:
    """(name, HTML) of every table with a number that the runs measure, without the other numbers."""
    models = {run.model for run in runs}
    known = {published for published, own in names()["models"].items() if own in models}
    found = []
    for name in tables():
        if known.isdisjoint(number.model for number in numbers(name)):
            continue
        table = compare(name, runs)
        measured = table.frame[table.frame["ours"] != HOLE]
        if len(measured):
            notes = [note for note in table.notes if not note.startswith("python -m ")]
            found.append((name, html(replace(table, frame=measured, notes=notes))))
    return found
