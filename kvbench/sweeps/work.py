"""One share of a sweep, computed by a worker or a job: its cells come from the folder, its outcomes go there."""

from __future__ import annotations

import socket
from pathlib import Path

from kvbench.records.definition import entries_of, read_definition
from kvbench.report.trackers.watching import Quiet, make_watch
from kvbench.sweeps.compute import compute
from kvbench.sweeps.leaving import leaving
from kvbench.sweeps.outcome import exit_code, explain
from kvbench.sweeps.plan import rebuilt
from kvbench.sweeps.recorder import Place, Recorder
from kvbench.sweeps.shares import read_share
from kvbench.terminal.command import FAILED
from kvbench.terminal.errors import UsageError


def work(out: Path, share: str, logged_to: str | None, requeues: bool = False) -> int:
    """Compute the cells of a share and return their exit code. Raises UsageError where the share cannot be had.

    requeues: a job that has to leave its node goes back to SLURM's queue.
    """
    pieces, gpus = read_share(out, share)
    definition = read_definition(out)
    entries = entries_of(definition, [key for key, _ in pieces])
    missing = _no_gpu(gpus)
    tracker = make_watch(entries[0].config["logger"], definition.name)
    planned, refused = [], Recorder([], Place(out, logged_to), Quiet())
    for entry, (_, shard) in zip(entries, pieces, strict=True):
        if missing:
            refused.never_began(entry, missing, FAILED)
            continue
        try:
            planned.append(rebuilt(entry, out, shard=shard))
        except UsageError as error:
            refused.never_began(entry, *explain(error)[::-1])
    refused.told.rest()
    recorder = Recorder(planned, Place(out, logged_to), tracker)
    try:
        with leaving(recorder, requeues):
            found = compute(planned, recorder, waits=False) if planned else []
    finally:
        tracker.close()
    return exit_code([outcome.code for outcome in (*refused.outcomes.values(), *found)])


def _no_gpu(asked: int) -> str:
    """The sentence for a job that got no GPU though it asked for some; empty where all is well."""
    if not asked:
        return ""
    import torch

    found = torch.cuda.device_count()
    if found >= asked:
        return ""
    return (
        f"launcher.gpus_per_node={asked} was asked for, but {socket.gethostname()} shows {found} to torch "
        f"{torch.__version__}: check the driver and the partition, or set launcher.gpus_per_node=0 for CPUs"
    )
