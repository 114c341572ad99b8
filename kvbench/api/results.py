"""Results in Python: the runs of `evaluate`, or those that lie in a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from kvbench.report.records import RunRecord, find_runs, in_order, labelled, with_baselines


class Results(Sequence[RunRecord]):
    def __init__(self, runs, where=None):
        self._runs = with_baselines(labelled(runs))
        self._where = where

    def __len__(self):
        return len(self._runs)

    def __getitem__(self, i):
        return self._runs[i]


def load_results(folder):
    return Results(find_runs(Path(folder)))
