"""`python -m kvbench`: one cell, or with -m a sweep, run by Hydra; errors are one sentence, results one table.

Exit codes: 0 all is well, 1 something failed while running, 2 a wrong value, 130 interrupted.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvbench.config.overrides import Asked, check, quoted
from kvbench.config.sweeps import command_lines
from kvbench.runs.samples import RunBusyError, RunLostError
from kvbench.terminal.console import log_to_stderr, quiet, share_cores
from kvbench.terminal.errors import UsageError

if TYPE_CHECKING:
    from kvbench.report.records import RunRecord
    from kvbench.report.trackers.watching import SweepWatch
    from kvbench.runs.cell import Cell

FAILED, WRONG, INTERRUPTED = 1, 2, 130
_watches: list[SweepWatch] = []  # of the sweep that runs in this process


@dataclass(frozen=True)
class Outcome:
    """What became of a cell: the folder of its results, or the sentence that says why there are none."""

    cell: str
    limit: int | None = None
    folder: str | None = None
    error: str | None = None
    code: int = 0
    process: str = field(default_factory=lambda: f"{socket.gethostname()}:{os.getpid()}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(arguments):
        from kvbench.config.help import help_text

        sys.stdout.write(help_text())
        return 0
    log_to_stderr()
    share_cores()
    try:
        asked = [check(line) for line in command_lines(arguments)]
        return _sweep(asked) if any(one.is_sweep for one in asked) else _hydra(asked[0].arguments)
    except (Exception, KeyboardInterrupt) as error:
        code, sentence = explain(error)
        _say(sentence, error if "debug=true" in [a.lower() for a in arguments] else None)
        return code


def explain(error: BaseException) -> tuple[int, str]:
    """The exit code and the one sentence for an error."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted; finished examples are kept, the same command continues"
    if isinstance(error, UsageError):
        return WRONG, str(error)
    if isinstance(error, HydraException | OmegaConfBaseException):
        return WRONG, str(error).strip().splitlines()[0]
    if isinstance(error, RunBusyError | RunLostError):
        return FAILED, str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return FAILED, f"no space left to write results ({error.strerror}); finished examples are kept, free some space"
    lines = str(error).strip().splitlines() or ["no message"]
    return FAILED, f"{type(error).__name__}: {lines[0]} (debug=true shows where)"


@hydra.main(version_base="1.3", config_path="pkg://kvbench.conf", config_name="config")
def _job(config: DictConfig) -> None:
    """One cell, in this process or wherever a launcher put it."""
    context = HydraConfig.get()
    sweeps = context.mode == RunMode.MULTIRUN
    outcome = _run(config, dict(context.runtime.choices), " ".join(context.overrides.task) if sweeps else "")
    if sweeps:
        folder = Path(context.sweep.dir) / "cells"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{context.job.num:06d}.json").write_text(json.dumps(asdict(outcome)), encoding="utf-8")
    else:
        sys.exit(_finish([outcome]))


def _run(config: DictConfig, choices: dict[str, str], title: str) -> Outcome:
    """Run one cell; whatever goes wrong is told at once and becomes part of the outcome, so that a sweep goes on."""
    share_cores()
    try:
        quiet()
        from kvbench.runs.cell import build_cell  # seconds of torch and transformers: not for --help, nor for a slip

        values = OmegaConf.to_container(config, resolve=True)
        assert isinstance(values, dict)
        preset = _preset(choices)
        cell = build_cell({str(k): v for k, v in values.items()}, choices["policy"], choices["model"], preset)
        record = _compute(cell, values["logger"], cell.out.resolve().name if title else None)
        failed, n = record.metrics["n_failed"], record.metrics["n"]
        broke = f"{failed} of {n} examples failed, see {record.folder}" if failed else None
        outcome = Outcome(title, cell.limit, str(record.folder), broke, FAILED if failed else 0)
        error: Exception | None = None
    except Exception as caught:
        error = caught
        code, sentence = explain(caught)
        outcome = Outcome(title, error=sentence, code=code)
    if outcome.error:
        _say(f"{title}: {outcome.error}" if title else outcome.error, error if config.debug else None)
    return outcome


def _compute(cell: Cell, logger: dict[str, Any], sweep: str | None) -> RunRecord:
    """Compute a cell; it is told to the sweep's tracker where this is the sweep's process, else to one of its own."""
    from kvbench.report.records import read_run
    from kvbench.report.trackers.watching import make_watch
    from kvbench.runs.engine import run_cells

    watch = _watches[-1] if _watches else make_watch(logger, sweep)
    records = []
    try:
        (ending,) = run_cells([cell], watch)
        if ending.folder is None:
            assert ending.error is not None
            raise ending.error
        records.append(read_run(ending.folder))
    finally:
        if not _watches:
            watch.close(records if sweep is None else ())
    return records[0]


def _preset(choices: dict[str, str]) -> dict[str, Any]:
    """The configuration of the same model, policy and task with no field set."""
    groups = [f"{group}={choices[group]}" for group in ("model", "policy", "task")]
    loader = GlobalHydra.instance().config_loader()
    config = loader.load_configuration("config", groups, RunMode.RUN)
    ours = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    values = OmegaConf.to_container(ours, resolve=True)
    assert isinstance(values, dict)
    return {str(k): v for k, v in values.items()}


def _sweep(asked: Sequence[Asked]) -> int:
    """Run sweeps: their cells leave their outcomes in a folder under `out`, wherever they ran."""
    from kvbench.report.records import read_run
    from kvbench.report.trackers.watching import make_watch
    from kvbench.runs.cell import writable

    out = writable(Path(str(asked[0].config.out)))
    folder = out.resolve() / f".sweep-{os.getpid()}"
    logger = OmegaConf.to_container(asked[0].config.logger, resolve=True)
    assert isinstance(logger, dict)
    watch = make_watch({str(k): v for k, v in logger.items()}, out.resolve().name)
    _watches.append(watch)
    outcomes: list[Outcome] = []
    try:
        try:
            places = [quoted(folder / f"{place:04d}") for place in range(len(asked))]
            codes = [_hydra([*one.arguments, f"hydra.sweep.dir={at}"]) for one, at in zip(asked, places, strict=True)]
        finally:
            written = sorted(folder.glob("*/cells/*.json"))
            outcomes = [Outcome(**json.loads(path.read_text(encoding="utf-8"))) for path in written]
            table = _finish(outcomes)
        return max(*codes, table)
    finally:
        _watches.pop()
        watch.close([read_run(Path(outcome.folder)) for outcome in outcomes if outcome.folder])
        shutil.rmtree(folder, ignore_errors=True)


def _hydra(arguments: Sequence[str]) -> int:
    """Let Hydra run what `arguments` say; its errors come out as exceptions."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # else Hydra prints a traceback of its own and exits
    sys.argv = [sys.argv[0], *arguments]
    try:
        _job()
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else 0
    return 0


def _finish(outcomes: Sequence[Outcome]) -> int:
    """Print the table of all cells that have results, and return the exit code of them all."""
    from kvbench.report.records import read_run
    from kvbench.report.table import print_table

    runs = [read_run(Path(outcome.folder), outcome.limit) for outcome in outcomes if outcome.folder]
    if runs:
        print_table(runs)
    for outcome in outcomes:
        if outcome.error and outcome.process != Outcome("").process:  # else it was said when it happened
            _say(f"{outcome.cell}: {outcome.error}")
    codes = {outcome.code for outcome in outcomes} - {0}
    if codes and len(outcomes) > 1:
        _say(f"{sum(outcome.code != 0 for outcome in outcomes)} of {len(outcomes)} cells failed")
    return FAILED if FAILED in codes else max(codes, default=0)


def _say(sentence: str, error: BaseException | None = None) -> None:
    """One sentence on stderr, after the traceback of `error` where one is asked for."""
    if error is not None:
        traceback.print_exception(error, file=sys.stderr)
    sys.stderr.write(f"kvbench: {sentence}\n")
