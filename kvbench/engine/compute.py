"""Compute many runs: used by a single run, a sweep, and each job of a sweep on a cluster."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from traceback import clear_frames
from typing import Any

from kvbench.engine.answers import units
from kvbench.engine.callbacks import NullCallback, RunCallback
from kvbench.engine.memory import MemoryPlanner
from kvbench.engine.one_by_one import one_by_one
from kvbench.engine.prompts import prompts_for
from kvbench.engine.reading import is_generated, is_read
from kvbench.engine.run_writer import RunWriter
from kvbench.engine.scheduler import BatchError, Scheduler
from kvbench.engine.work import turns
from kvbench.models.loading import LoadedModel, load
from kvbench.policies.press import KVPress
from kvbench.results.environment import environment
from kvbench.results.totals import Totals, record
from kvbench.run.run import Run
from kvbench.terminal.bars import meter

OPEN_AT_ONCE = 200
"""Runs of a group whose files are open together: macOS lets a process have 256."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ending:
    """What became of a cell: the folder of its results, or the error that kept it from being complete."""

    cell: Run
    folder: Path | None = None
    error: Exception | None = None


def run_cells(cells: Sequence[Run], watch: RunCallback | None = None) -> list[Ending]:
    """Compute what is missing of all cells; an error ends its own cell only. Endings in the order of the cells.

    Cells that share model, device, task, seed and generation settings are worked together, example by example
    (`engine.rows`), and their samples appear in step. Whatever leaves this function early, an interrupt say, leaves
    whole files behind, with everything that was computed in order.
    """
    groups = grouped(cells, NullCallback() if watch is None else watch)
    for group in groups:
        for start in range(0, len(group), OPEN_AT_ONCE):
            _work(group[start : start + OPEN_AT_ONCE])
    runs = {id(cell): run for group in groups for run in group for cell in run.cells}
    found = [(cell, runs[id(cell)]) for cell in cells]
    return [Ending(cell, None if run.error else run.folder, run.error) for cell, run in found]


def grouped(cells: Sequence[Run], watch: RunCallback) -> list[list[RunWriter]]:
    """The runs of all cells, those together that differ in nothing but policy, budget and limit.

    Groups of one model follow each other, so that its weights are loaded once. Cells of one run id are one run.
    """
    asked: defaultdict[tuple[str, ...], dict[str, list[Run]]] = defaultdict(dict)
    for cell in cells:
        identity = cell.identity
        shared = {k: v for k, v in identity.items() if k not in ("policy", "budget", "code")}
        model = json.dumps([identity["model"], identity["dtype"], repr(cell.checkpoint.spec), str(cell.device)])
        key = (model, json.dumps(shared, sort_keys=True), repr(cell.task))
        asked[key].setdefault(str(cell.folder), []).append(cell)
    models = list(dict.fromkeys(model for model, *_ in asked))
    ordered = sorted(asked.items(), key=lambda item: models.index(item[0][0]))
    return [[RunWriter(alike[0].run_id, alike, watch) for alike in runs.values()] for _, runs in ordered]


def _work(runs: Sequence[RunWriter]) -> None:
    """Compute what the runs of one group lack; no exception but an interrupt comes out."""
    try:
        _check(runs)
        for run in runs:
            if not run.ended and not run.missing:
                with run.own():
                    run.finish()
        lacking = [run for run in runs if not run.ended]
        if lacking:
            _compute(lacking)
    except Exception as error:
        for run in runs:
            run.end(error)
    finally:
        for run in runs:
            run.close()
            if run.error is not None:  # its frames hold caches, and the model, which the next one takes the place of
                clear_frames(run.error.__traceback__)


def _check(runs: Sequence[RunWriter]) -> None:
    prompts = prompts_for([run.cell for run in runs])
    for run in runs:
        with run.own():
            run.check(prompts.first(run.cell.limit))


def _compute(runs: Sequence[RunWriter]) -> None:
    cell = runs[0].cell
    loaded = load(cell.checkpoint, cell.device)
    here: dict[str, Any] = {**environment(cell.device), "model": loaded.record}
    for run in runs:
        with run.own():
            run.begin(here)
    for limit, alike in _by_way([run for run in runs if not run.ended]):
        _work_turns(loaded, limit, alike)
    for run in runs:
        with run.own():
            if not run.ended:
                run.finish()


def _by_way(runs: Sequence[RunWriter]) -> Iterator[tuple[int | None, list[RunWriter]]]:
    """The runs by how many of their sequences may be in flight (None: what memory allows); 1: one by one.

    What reads or rates given tokens, what answers a history of its own answers, and every press of kvpress, has the
    model to itself. Steps that are recorded are not mixed with others.
    """
    ways: defaultdict[tuple[int | None, bool], list[RunWriter]] = defaultdict(list)
    for run in runs:
        shares = all(is_generated(prompt) and not prompt.own for prompt in run.prompts) and not isinstance(
            run.cell.policy, KVPress
        )
        ways[run.cell.rows if shares else 1, run.cell.cuda_graph].append(run)
    for (limit, _), alike in ways.items():
        yield limit, alike


def _work_turns(loaded: LoadedModel, limit: int | None, runs: Sequence[RunWriter]) -> None:
    asked, totals = turns(runs), Totals()
    total = sum(units(run.prompts[index]) for run in runs for index in range(len(run.prompts)))
    done = total - sum(units(turn.prompt) * len(turn.runs) for turn in asked)
    try:
        unit = "tokens" if any(is_read(prompt) for run in runs for prompt in run.prompts) else "examples"
        with meter(_title(runs), total, done, unit) as advance:
            if limit != 1:
                try:
                    Scheduler(loaded, asked, MemoryPlanner(limit), totals, advance).work()
                except BatchError as error:
                    log.warning("a batch failed (%s): the examples that lack are computed one by one", error)
            one_by_one(loaded, asked, advance)  # all of them, or those that are left
    finally:
        if totals.rows:
            log.info("%s", totals)
            record({run.folder: run.run_id for run in runs}, totals)


def _title(runs: Sequence[RunWriter]) -> str:
    cell = runs[0].cell
    who = (cell.policy_name, cell.budget or "") if len(runs) == 1 else (f"{len(runs)} runs",)
    return " ".join(str(word) for word in (*who, cell.task.name))
