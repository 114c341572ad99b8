"""Compute runs: a single one, those of a sweep, or those of one job of a sweep on a cluster."""

from __future__ import annotations

import json
import logging
import os
import resource
from collections import defaultdict
from collections.abc import Sequence
from traceback import clear_frames
from typing import Any

from kvbench.engine.prompts import in_batch, prompts_for
from kvbench.engine.run_writer import RunCallback, RunWriter, work_items
from kvbench.engine.scheduler import Scheduler
from kvbench.models.compiled import compiled_layers
from kvbench.models.devices import description
from kvbench.models.loading import LoadedModel, load
from kvbench.results.definition import damaged_records
from kvbench.results.session import Totals, environment, record
from kvbench.run.run import Run
from kvbench.terminal.progress import meter

OPEN_RUNS = 200
"""The most runs whose files are open at one time."""
FILES_OF_A_RUN, OTHER_FILES = 2, 56
"""Open files: of each run its samples and its lock; and those of models, data, trackers and processes."""

log = logging.getLogger(__name__)


def compute_runs(runs: Sequence[Run], callback: RunCallback | None = None) -> list[Exception | None]:
    """Compute the missing examples of all runs. Returns the error of each run, which ends only this run, or None.

    Runs with the same model, device, task, seed and generation settings are computed together, example by example
    (`engine.rows`). A sample is on disk as soon as it and the samples before it are computed.
    """
    groups = grouped(runs, callback or RunCallback())
    for group in groups:
        many = _open_runs()
        for start in range(0, len(group), many):
            _compute(group[start : start + many])
    writers = {id(run): writer for group in groups for writer in group for run in writer.runs}
    return [writers[id(run)].error for run in runs]


def _open_runs() -> int:
    """The runs that may be open at one time: macOS, for example, allows 256 open files per process."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return OPEN_RUNS
    free = allowed - len(os.listdir("/dev/fd")) - OTHER_FILES
    return max(1, min(OPEN_RUNS, free // FILES_OF_A_RUN))


def grouped(runs: Sequence[Run], callback: RunCallback) -> list[list[RunWriter]]:
    """The runs in groups that differ only in policy, budget and limit; runs with one id are one `RunWriter`.

    Groups of one model are neighbours, so that its weights are loaded once.
    """
    found: defaultdict[tuple[str, ...], dict[str, list[Run]]] = defaultdict(dict)
    for run in runs:
        identity = run.identity
        shared = {k: v for k, v in identity.items() if k not in ("policy", "budget", "code")}
        model = json.dumps([identity["model"], identity["dtype"], repr(run.checkpoint.spec), str(run.device)])
        key = (model, json.dumps(shared, sort_keys=True), repr(run.task))
        found[key].setdefault(str(run.folder), []).append(run)
    models = list(dict.fromkeys(model for model, *_ in found))
    ordered = sorted(found.items(), key=lambda item: models.index(item[0][0]))
    return [[RunWriter(same[0].run_id, same, callback) for same in folders.values()] for _, folders in ordered]


def _compute(writers: Sequence[RunWriter]) -> None:
    """Compute one group of runs; only an interrupt is raised."""
    try:
        prompts = prompts_for([writer.run for writer in writers])
        if prompts.made:  # else the error of the first prompt says more, such as the name of a missing file
            writers[0].run.check_data()
        for writer in writers:
            with writer.isolated():
                writer.check(prompts.first(writer.run.limit))
                if not writer.missing and not damaged_records(writer.folder):
                    writer.finish()
        unfinished = [writer for writer in writers if not writer.ended]
        if unfinished:
            _compute_missing(unfinished)
    except Exception as error:
        for writer in writers:
            writer.end(error)
    finally:
        for writer in writers:
            writer.close()
            if writer.error is not None:  # its frames hold caches and the model, which the next group replaces
                clear_frames(writer.error.__traceback__)


def _compute_missing(writers: Sequence[RunWriter]) -> None:
    run = writers[0].run
    loaded = load(run.checkpoint, run.device)
    here: dict[str, Any] = {**environment(description(run.device)), "model": loaded.record}
    for writer in writers:
        with writer.isolated():
            writer.begin(here)
    batches: defaultdict[tuple[int | None, bool], list[RunWriter]] = defaultdict(list)
    for writer in writers:
        if not writer.ended:
            batches[_limit(writer), writer.run.cuda_graph].append(writer)  # recorded steps are not mixed with others
    with compiled_layers(loaded.model, run.compile):
        for (limit, _), some in batches.items():
            _compute_batch(loaded, limit, some)
    for writer in writers:
        with writer.isolated():
            if not writer.ended:
                writer.finish()


def _limit(writer: RunWriter) -> int | None:
    """The maximum size of a run's batch; None: as memory allows.

    1 for runs that score pairs or whole texts, for conversations with the model's own answers, and for policies with
    a cache of their own.
    """
    batched = all(in_batch(writer.run, prompt) and not prompt.own for prompt in writer.prompts)
    return writer.run.rows if batched else 1


def _compute_batch(loaded: LoadedModel, limit: int | None, writers: Sequence[RunWriter]) -> None:
    prompts = [(prompt, writer.has(index)) for writer in writers for index, prompt in enumerate(writer.prompts)]
    units = [(prompt.tokens if prompt.is_scored else 1, done) for prompt, done in prompts]  # a text can take an hour
    unit = "tokens" if any(prompt.is_scored for prompt, _ in prompts) else "examples"
    totals = Totals()
    try:
        with meter(_title(writers), sum(n for n, _ in units), sum(n for n, done in units if done), unit) as advance:
            Scheduler(loaded, work_items(writers), limit, totals, advance).work()
            for writer in writers:
                writer.run_alone = False
            Scheduler(loaded, work_items(writers), 1, Totals(), advance).work()  # what the batch has left
    finally:
        if totals.rows and limit != 1:
            log.info("%s", totals)
            record({writer.folder: writer.run_id for writer in writers}, totals)


def _title(writers: Sequence[RunWriter]) -> str:
    run = writers[0].run
    name = (run.policy_name, run.budget or "") if len(writers) == 1 else (f"{len(writers)} runs",)
    return " ".join(str(word) for word in (*name, run.task.name))
