"""A run of W&B for every cell, while it is computed, and one for the sweep they belong to."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import wandb

from kvbench.analysis.columns import COLUMNS
from kvbench.analysis.load import Results, read_result
from kvbench.analysis.result import Result
from kvbench.identity.cell import Cell
from kvbench.records.files import write_json
from kvbench.records.sample import Sample
from kvbench.report.trackers import run_info
from kvbench.report.trackers.run_info import RunInfo
from kvbench.report.trackers.wandb_settings import WandbSettings, environment
from kvbench.terminal.errors import UsageError

SENT = "wandb.json"
"""In a run's folder: to which project how many of its examples went, and whether its summary did, with differences."""
_LONGEST_ID = 64
_INTERRUPTED = 130
_LIGHT: dict[str, Any] = {
    "silent": True,
    "console": "off",
    "disable_git": True,
    "disable_job_creation": True,
    "save_code": False,
    "x_transaction_log_flush_interval": 1.0,  # offline; what was not flushed is lost with a kill -9
    "x_save_requirements": False,  # 0.2 s per run: the versions that count are in the config
}
"""What W&B does beside its runs, unless WANDB_* says otherwise; a process may have hundreds of them at once."""

log = logging.getLogger(__name__)


@dataclass
class _Tracked:
    """A cell whose run of W&B is open."""

    run: wandb.Run
    folder: Path
    samples: list[Sample] = field(default_factory=list)


class WandbWatch:
    """Sends cells to W&B as they are computed; its caller catches errors.

    A complete cell's run stays open until its difference to the full cache is known, or until `close`.
    """

    def __init__(self, settings: WandbSettings, sweep: str | None) -> None:
        self._settings, self._sweep = settings, sweep
        self._open: dict[str, _Tracked] = {}  # by run_id
        self._complete: dict[str, Result] = {}
        self._begun = 0

    def started(self, cell: Cell, done: Sequence[Sample], total: int) -> None:
        """Open the cell's run, or continue it, and add the examples that it lacks."""
        self._open[cell.run_id] = self._begin(run_info.cell_info(cell), done)

    def finished(self, cell: Cell, sample: Sample) -> None:
        """Add an example to the curves."""
        self._add(self._open[cell.run_id], sample)

    def ended(self, cell: Cell, error: Exception | None) -> None:
        """Write the run's summary, or its error. A cell that computed nothing is not sent."""
        name = cell.run_id
        tracked = self._open.get(name)
        if tracked is None:
            return
        if error is not None:
            tracked.run.summary["error"] = f"{type(error).__name__}: {error}"
            self._open.pop(name).run.finish(exit_code=1)
            return
        self._complete[name] = read_result(cell.folder)
        self._summarise(tracked, self._complete[name])
        for record in Results(self._complete.values()):
            if record.baseline is not None or record.is_full:
                self._finish(record)

    def close(self, records: Sequence[Result] = ()) -> None:
        """End all runs; send the `records` that W&B lacks, and a sweep's table and pictures.

        Without `records` this process knows only a part of the sweep, and leaves its table to the one that knows all.
        """
        self.send((*records, *self._complete.values()), whole=bool(records))
        for tracked in self._open.values():
            tracked.run.finish(exit_code=_INTERRUPTED)
        self._open.clear()

    def send(self, records: Sequence[Result], *, whole: bool = True) -> int:
        """Send the runs that W&B lacks, and a whole sweep if it changed; returns how many runs were sent."""
        rows = Results(records)
        lacking = [record for record in rows if not self._has_all(record)]
        for record in lacking:
            if record.run_id not in self._open:
                tracked = self._open[record.run_id] = self._begin(run_info.result_info(record), record.samples)
                self._summarise(tracked, record)
            self._finish(record)
        if rows and whole and self._sweep is not None:
            self._send_sweep(rows)
        return len(lacking)

    def _begin(self, run: RunInfo, done: Sequence[Sample]) -> _Tracked:
        opened = self._init(_short(run.run_id), run.title, run.task, run.config)
        opened.define_metric("example/*", summary="none")  # else the last example's would stand among the means
        tracked = _Tracked(opened, run.folder)
        noted: int = self._sent(run.folder).get("examples", 0)
        known = opened.starting_step if opened.resumed else noted if done else 0
        tracked.samples += done[:known]
        for sample in done[known:]:
            self._add(tracked, sample)
        return tracked

    def _init(self, run_id: str, title: str, kind: str, config: dict[str, Any]) -> wandb.Run:
        known, given = self._settings, environment()
        more = {**_LIGHT, "x_disable_stats": self._begun > 0}  # one run of a process measures the machine for all
        more["finish_timeout"] = max(known.patience, 1)  # 0 would be for ever
        self._begun += 1
        opened = wandb.init(
            project=known.project,
            entity=known.entity,
            mode="online" if known.mode == "online" else "offline",
            dir=known.folder,
            id=run_id,
            name=title,
            group=given.run_group or self._sweep,
            job_type=given.run_job_type or kind,
            tags=known.tags,
            config=config,
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(**{k: v for k, v in more.items() if k not in given.model_fields_set}),
        )
        if self._begun == 1:
            where = opened.project_url if known.mode == "online" else f"files in {known.folder}/wandb for `wandb sync`"
            log.info("W&B: %s", where)
        return opened

    def _add(self, tracked: _Tracked, sample: Sample) -> None:
        tracked.samples.append(sample)
        tracked.run.log(run_info.history_row(tracked.samples), step=sample.index, commit=True)
        self._note(tracked, complete=False)

    def _summarise(self, tracked: _Tracked, record: Result) -> None:
        tracked.run.summary.update(run_info.summary_row(record))
        tracked.run.summary["examples"] = _table(*run_info.example_table(record.samples))

    def _finish(self, record: Result) -> None:
        """The summary with what is known by now of the full cache, and the end of a complete run."""
        tracked = self._open.get(record.run_id)
        if tracked is None:
            return
        tracked.run.summary.update(run_info.summary_row(record))
        tracked.run.finish(exit_code=1 if record.n_failed else 0)
        self._note(tracked, complete=True, compared=record.baseline is not None)
        del self._open[record.run_id]

    @property
    def _place(self) -> dict[str, Any]:
        known = self._settings
        return {"mode": known.mode, "entity": known.entity, "project": known.project}

    def _note(self, tracked: _Tracked, *, complete: bool, compared: bool = False) -> None:
        told_of = {"examples": len(tracked.samples), "complete": complete, "compared": compared}
        write_json(tracked.folder / SENT, {**self._place, **told_of})

    def _sent(self, folder: Path) -> dict[str, Any]:
        """What was noted of a run in this project; nothing where that is unknown."""
        found = _read(folder / SENT)
        return found if all(found.get(key) == value for key, value in self._place.items()) else {}

    def _has_all(self, record: Result) -> bool:
        sent = self._sent(record.folder)
        whole = sent.get("complete", False) and sent["examples"] >= len(record.samples)
        return whole and (sent["compared"] or record.baseline is None)

    def _send_sweep(self, rows: Sequence[Result]) -> None:
        """The run `sweep-<name>`: the tidy table of all its runs and the pictures of `kvbench.plot`."""
        name = f"sweep-{self._sweep}"
        held = [[run.run_id, len(run.samples)] for run in sorted(rows, key=lambda run: run.run_id)]
        digest = hashlib.sha256(json.dumps(held).encode()).hexdigest()
        note = Path(self._settings.folder) / "wandb" / f"{_short(name)}.json"
        if _read(note) == {**self._place, "runs": digest}:
            return
        run = self._init(_short(name), name, "sweep", {"runs": len(rows)})
        table = _table([c.name for c in COLUMNS], [[c.value(row) for c in COLUMNS] for row in rows])
        with tempfile.TemporaryDirectory() as pictures:
            run.log({"table": table, **_pictures(rows, Path(pictures))})
        run.finish()
        write_json(note, {**self._place, "runs": digest})


def _table(columns: Sequence[str], rows: Sequence[Iterable[Any]]) -> wandb.Table:
    return wandb.Table(list(columns), list(rows), allow_mixed_types=True)


def _pictures(rows: Sequence[Result], folder: Path) -> dict[str, wandb.Image]:
    """Score against budget and bytes, heat maps and whatever else there is data for, by name; written to `folder`."""
    from kvbench.report.figures import panels, pictures  # here: matplotlib takes a second

    try:
        paths = pictures.draw(pictures.ALL, panels.once(rows), folder, ".png")
    except UsageError as nothing:
        log.info("no picture for W&B: %s", nothing)
        return {}
    return {path.stem: wandb.Image(str(path)) for path in paths}


def _short(name: str) -> str:
    """A run's id as W&B allows it: 64 characters at most, the end kept, which tells runs apart."""
    plain = re.sub(r"[^A-Za-z0-9._=-]", "_", name)
    return plain if len(plain) <= _LONGEST_ID else f"{plain[: _LONGEST_ID - 11]}-{plain[-10:]}"


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
