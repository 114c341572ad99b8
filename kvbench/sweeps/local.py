"""`launcher=local`: cells are computed on this machine, in this process or in several, one for each GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbench.policies.checks import whole_number
from kvbench.records.definition import Entry
from kvbench.records.retries import drop_failed
from kvbench.report.trackers.watching import SweepWatch
from kvbench.sweeps.compute import compute, outcomes
from kvbench.sweeps.jobs import LOGS
from kvbench.sweeps.launcher import Launcher, Sweep
from kvbench.sweeps.outcome import finish
from kvbench.sweeps.recorder import Place, Recorder
from kvbench.sweeps.shares import check_shards, cut, new_stamp, pieces, write_share
from kvbench.sweeps.states import outcomes_on_disk
from kvbench.sweeps.waiting import sample_meter
from kvbench.terminal.command import FAILED, say


@dataclass(frozen=True)
class Local(Launcher):
    """The cells of a sweep on this machine.

    workers: processes that each compute a share of the cells, on a GPU of its own where there are GPUs (one that is
    shared otherwise), and on their part of the cores; 1: this process computes them all, with one loaded model.
    shards: parts of each cell's examples, which several workers can compute at once.
    """

    workers: int = 1
    shards: int = 1

    def __post_init__(self) -> None:
        whole_number("launcher.workers", self.workers, 1)
        check_shards(self.shards)
        if self.shards > 1 == self.workers:
            raise ValueError(
                f"launcher.shards={self.shards} needs launcher.workers=2 or more: one worker computes all examples"
            )

    @property
    def hands_on(self) -> bool:
        """A lone cell is for one process, unless its examples are split."""
        return self.shards > 1

    def launch(self, sweep: Sweep) -> int:
        """Compute what is missing; one table at the end, also of what was finished when somebody interrupted it."""
        for cell in (p.cell for p in sweep.planned if p.cell is not None):
            drop_failed(cell.folder)
        with sweep.tracked() as tracker:
            if sweep.definition is None or self.workers == 1:
                return self._here(sweep, tracker)
            return self._beside(sweep)

    def _beside(self, sweep: Sweep) -> int:
        entries = [p.entry for p in sweep.planned]
        asked = [p.entry for p in sweep.planned if p.cell is not None]  # finished ones too: their data may have changed
        try:
            code = self._workers(sweep.out, asked) if asked else 0
        except KeyboardInterrupt:
            finish(outcomes_on_disk(sweep.out, entries, begun_only=True), sweep.shows)
            raise
        return finish(outcomes_on_disk(sweep.out, entries), sweep.shows) or code

    def _here(self, sweep: Sweep, tracker: SweepWatch) -> int:
        alone = sweep.definition is None
        recorder = Recorder(sweep.planned, None if alone else Place(sweep.out), tracker)
        try:
            return finish(compute(sweep.planned, recorder, waits=not alone), sweep.shows)
        except KeyboardInterrupt:
            if not alone:
                finish(outcomes(sweep.planned, recorder), sweep.shows)
            raise

    def _workers(self, out: Path, entries: Sequence[Entry]) -> int:
        stamp = new_stamp()
        asked = pieces(entries, self.shards)
        shares = cut(asked, min(self.workers, len(asked)))
        for number, share in enumerate(shares):
            write_share(out, f"{stamp}-{number}", share)
        workers = {f"{stamp}-{n}": _start(out, f"{stamp}-{n}", n, len(shares)) for n in range(len(shares))}
        cells = f"{len(entries)} cell{'s' * (len(entries) > 1)} in {len(workers)} processes"
        say(f"{cells}, their logs: {out / LOGS}/{stamp}-*.log")
        try:
            with sample_meter(out, entries) as look:
                while any(process.poll() is None for process in workers.values()):
                    look()
                    time.sleep(0.2)
        except KeyboardInterrupt:
            for process in workers.values():
                process.terminate()
            for process in workers.values():
                process.wait()
            raise
        killed = {name: -process.returncode for name, process in workers.items() if process.returncode < 0}
        for name, number in killed.items():
            say(f"worker {name} was killed (signal {number}), the same command continues")
        return FAILED if killed else 0


def _start(out: Path, name: str, number: int, of: int) -> subprocess.Popen[bytes]:
    """A process that computes a share; it ends when this one does, however that ends."""
    path = out / LOGS / f"{name}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "kvbench.sweep", "work", str(out), "--share", name, "--log", str(path)]
    with path.open("ab") as log:
        return subprocess.Popen(
            [*command, "--with-parent"],
            env={**os.environ, **_own_part(number, of)},
            stdin=subprocess.PIPE,  # closed when this process is gone
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C reaches this process alone, which then stops its workers in order
        )


def _own_part(number: int, of: int) -> dict[str, str]:
    """What one of several workers sees of the machine: one GPU in turn, and its part of the cores."""
    gpus = visible_gpus()
    if gpus:
        return {"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // of)))}


def visible_gpus() -> list[str]:
    """The CUDA devices of this process, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    if told:
        return told.split(",")
    return [str(i) for i in range(torch.cuda.device_count())]
