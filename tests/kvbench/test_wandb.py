"""`logger=wandb` with W&B itself, offline: what its files hold; and that no tracker can change a run."""

import json
import logging
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from plotted_runs import sample, write_run
from small_cells import SMALL, small_cell

from kvbench.cli import main
from kvbench.engine.compute import compute_runs
from kvbench.errors import UsageError
from kvbench.report.wandb_logger import WandbLogger
from kvbench.results.loading import read_result
from kvbench.results.result import Result
from kvbench.results.samples import Sample
from kvbench.run.run import Run
from kvbench.sweeps.compute import Guarded, SweepCallback, make_watch

TARGET = "kvbench.report.wandb_logger.WandbLogger"
STARTS = pytest.mark.slow("starts W&B's own process")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An empty folder, and W&B as a new process finds it: it reads its environment once."""
    import wandb

    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    wandb.teardown()
    yield
    wandb.teardown()


class Stored:
    """One offline run, from W&B's own file: its description, history, last summary, and exit code."""

    def __init__(self, path: Path) -> None:
        self.path, self.history, self.summary, self.config = path, [], {}, {}
        for record in _records(path.read_bytes()):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                self.run, self.config = record.run, _items(record.run.config.update)
            elif kind == "history":
                self.history.append(_items(record.history.item))
            elif kind == "summary":
                self.summary |= _items(record.summary.update)
            elif kind == "exit":
                self.exit_code = record.exit.exit_code

    def column(self, name: str) -> list[Any]:
        return [row.get(name) for row in self.history]

    def table(self, path: str) -> list[dict[str, Any]]:
        found = json.loads((self.path.parent / "files" / path).read_text())
        return [dict(zip(found["columns"], row, strict=True)) for row in found["data"]]


def _records(data: bytes) -> Iterator[Any]:
    """The records of a file: LevelDB's log format, blocks of 32 KiB, after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    at, whole = 7, b""
    while at + 7 <= len(data):
        if (left := 2**15 - at % 2**15) < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        whole, at = whole + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(whole)
            whole = b""


def _items(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def stored(folder: Path) -> list[Stored]:
    """The runs in a folder of W&B, the oldest first, once its process has written them."""
    import wandb

    wandb.teardown()
    return [
        Stored(path)
        for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_ctime)
    ]


@STARTS
def test_a_sweep_is_one_offline_run_for_each_run_and_one_with_the_table(tmp_path: Path, tiny_model: Path) -> None:
    out = tmp_path / "mine"
    asked = [("streamingllm", 40), ("streamingllm", 80), ("full", 40)]
    cells = [small_cell(out, tiny_model, policy, budget, "engine.rows=1") for policy, budget in asked]
    node = {"_target_": TARGET, "project": "caches", "entity": "lab", "tags": ["a", "b"], "folder": str(out)}
    watch = make_watch(node, "mine")
    watch.close(
        [read_result(cell.folder) for cell, error in zip(cells, compute_runs(cells, watch), strict=True) if not error]
    )
    found = {one.config.get("run_id", one.run.display_name): one for one in stored(out)}
    assert set(found) == {*(cell.run_id for cell in cells), "sweep-mine"}
    for cell in cells:
        one = found[cell.run_id]
        lines = [json.loads(line) for line in (cell.folder / "samples.jsonl").read_text().splitlines()]
        assert (one.run.project, one.run.entity, one.run.run_group) == ("caches", "lab", "mine")
        assert (one.run.job_type, [*one.run.tags], one.exit_code) == ("niah", ["a", "b"], 0)
        kept = [fmean(n for layer in line["kept_tokens"] for n in layer) for line in lines]
        assert one.column("example/kept_tokens") == kept
        for column in ("score", "cache_bytes", "peak_bytes", "prefill_seconds", "decode_seconds"):
            assert one.column(f"example/{column}") == [line[column] for line in lines], column
        assert one.column("score") == [fmean(line["score"] for line in lines[: n + 1]) for n in range(3)]
        table = one.table(one.summary["examples"]["path"])
        for column in ("prompt_hash", "output"):
            assert [row[column] for row in table] == [line[column] for line in lines]
        metrics = json.loads((cell.folder / "metrics.json").read_text())
        for key in ("score", "score_low", "score_high", "kept_tokens", "cache_bytes", "prefill_seconds", "n"):
            assert one.summary[key] == metrics[key], key
        assert "score_vs_full" not in one.summary, "three examples are too few for a comparison"
    tight = found[cells[0].run_id].config
    assert (tight["model"], tight["policy"], tight["budget"]) == (tiny_model.name, "streamingllm", 40)
    assert (tight["schedule"], tight["policy.scorer.sinks"], tight["task.lengths"]) == ("prompt", 4, [300])
    (whole,) = found["sweep-mine"].history
    assert {row["run_id"] for row in found["sweep-mine"].table(whole["table/path"])} == {cell.run_id for cell in cells}
    assert {"budget/path", "bytes/path", "heatmap/path"} <= set(whole)


class Replayed(Run):
    """A run on disk, as a watch sees it while it is computed."""

    def __init__(self, folder: Path) -> None:
        self.__dict__["row"] = read_result(folder)

    run_id = property(lambda self: self.row.run_id)
    folder = property(lambda self: self.row.folder)
    identity = property(lambda self: self.row.identity)
    naming = property(lambda self: self.row.naming)
    device = property(lambda self: torch.device("cpu"))


def written(out: Path, policy: str, scores: list[float | None], budget: int | None = 64) -> Replayed:
    return Replayed(write_run(out, policy, [sample(i, score) for i, score in enumerate(scores)], budget))


@STARTS
def test_failed_runs_and_failed_examples_are_marked_and_a_complete_run_is_not_sent_again(tmp_path: Path) -> None:
    cell, other = written(tmp_path / "a", "tova", [1.0, None]), written(tmp_path / "b", "h2o", [1.0, None])
    complete = written(tmp_path / "c", "cake", [1.0])
    watch = WandbLogger(folder=str(tmp_path)).watch(None)
    watch.started(cell, cell.row.samples[:1], 2)
    watch.ended(cell, OSError("no space"))
    watch.started(other, other.row.samples, 2)
    watch.ended(other, None)
    watch.ended(complete, None)
    watch.close([other.row, complete.row])
    failed, broken = stored(tmp_path)
    assert (failed.exit_code, failed.summary["error"]) == (1, "OSError: no space")
    assert (broken.exit_code, broken.summary["n_failed"], broken.history[-1]["n_failed"]) == (1, 1, 1)
    assert "score" not in broken.summary
    assert broken.table(broken.summary["examples"]["path"])[1]["error"].startswith("BudgetError")


@STARTS
def test_finished_runs_are_logged_later_and_equal_runs_of_two_folders_are_two(tmp_path: Path) -> None:
    for name in ("a", "b"):
        written(tmp_path / name, "full", [1.0, 1.0], None)
        written(tmp_path / name, "tova", [1.0, 0.0])
        place = f"logger.folder={tmp_path}"
        assert main(["results", "log", str(tmp_path / name), "logger=wandb", "logger.project=p", place]) == 0
    runs = stored(tmp_path)
    titles = [one.run.display_name for one in runs]
    assert titles == [*(first := ["pocket full niah", "pocket tova 64 niah"]), "sweep-a", *first, "sweep-b"]
    assert len({one.run.run_id for one in runs}) == 6
    assert [one.summary.get("score") for one in runs[:2]] == [1.0, 0.5]
    assert main(["results", "log", str(tmp_path / "a"), "logger=wandb", place]) == 0  # another project, other ids
    assert main(["results", "log", str(tmp_path / "a"), "logger=wandb", "logger.project=p", place]) == 0
    again = [one.run.run_id for one in stored(tmp_path)[-6:]]
    assert again[3:] == [one.run.run_id for one in runs[:3]]
    assert len({*again}) == 6


@STARTS
def test_a_trial_of_a_sweep_is_the_run_of_the_agent_also_if_it_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`wandb agent` starts the command of docs/wandb.md and waits for the score in its own run."""
    monkeypatch.setenv("WANDB_SWEEP_ID", "s1")
    monkeypatch.setenv("WANDB_RUN_ID", "chosen")
    cell = written(tmp_path / "a", "tova", [1.0, 0.0])
    watch = WandbLogger(folder=str(tmp_path)).watch(None)
    watch.ended(cell, None)  # finished by an earlier trial
    watch.close()
    (one,) = stored(tmp_path)
    assert (one.run.run_id, one.summary["score"], len(one.history)) == ("chosen", 0.5, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "sometimes"}, "logger.mode must be offline, online or disabled, got 'sometimes'"),
        ({"project": "a/b"}, "logger.project=a/b is refused by W&B"),
        ({"folder": "/proc/none"}, "logger.folder=/proc/none cannot be created"),
        ({"tags": "x"}, "logger.tags=x must be a list of texts"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_is_computed(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        make_watch({"_target_": TARGET, **fields}, "sweep")
    assert message in str(refused.value)


class Broken(SweepCallback):
    """A tracker that fails at one of its calls."""

    def __init__(self, call: str, error: BaseException) -> None:
        self.calls: list[str] = []
        self._call, self._error = call, error

    def _take(self, call: str) -> None:
        self.calls.append(call)
        if call == self._call:
            raise self._error

    def started(self, cell: Run, done: Sequence[Sample], total: int) -> None:
        self._take("started")

    def finished(self, cell: Run, sample: Sample) -> None:
        self._take("finished")

    def ended(self, cell: Run, error: Exception | None) -> None:
        self._take("ended")

    def close(self, records: Sequence[Result] = ()) -> None:
        self._take("close")


CALLS = ["started", "finished", "finished", "finished", "ended", "close"]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        *((call, RuntimeError("no network\nmore")) for call in ("started", "finished", "ended", "close", "never")),
        ("finished", SystemExit(3)),
    ],
)
def test_a_tracker_that_raises_is_one_warning_and_changes_nothing(
    call: str, error: BaseException, tmp_path: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Broken(call, error)
    watch = Guarded(broken, "some")
    cell = small_cell(tmp_path, tiny_model)
    assert compute_runs([cell], watch) == [None]
    watch.close()
    watch.close()  # a second call does nothing
    assert len((cell.folder / "samples.jsonl").read_text().splitlines()) == 3
    assert broken.calls == (CALLS if call == "never" else CALLS[: CALLS.index(call) + 1])
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == (call != "never")
    assert all(w.startswith(f"logger=some failed ({type(error).__name__}: ") for w in warnings)


@pytest.mark.slow("waits for W&B to give a server up: half a minute")
def test_a_server_that_never_answers_does_not_hang_a_run(tmp_path: Path, tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        command = [f"model={tiny_model}", "policy=streamingllm", "budget=40", *SMALL, "out=o", "logger=wandb"]
        ended = subprocess.run(
            [sys.executable, "-m", "kvbench", *command, "logger.mode=online", "logger.patience=2"],
            env={**os.environ, "WANDB_BASE_URL": address, "WANDB_API_KEY": "a" * 40},
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert ended.returncode == 0, ended.stderr
    assert "logger=wandb" in ended.stderr
    assert len([*Path("o").glob("*/metrics.json")]) == 1
