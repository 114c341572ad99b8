"""What W&B's own offline files hold after a run, a sweep, a kill and a rerun."""

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from plotted_runs import sample, write_run
from small_cells import SMALL, small_cell
from wandb_files import OfflineRun, offline_runs

from kvbench.analysis.load import load_results, read_result
from kvbench.cli import main
from kvbench.engine.run import run_cells
from kvbench.identity.cell import Cell
from kvbench.identity.labels import Naming
from kvbench.records.samples import read_samples
from kvbench.report.command import main as results
from kvbench.report.trackers.wandb_settings import WandbSettings
from kvbench.report.trackers.wandb_watch import WandbWatch
from kvbench.report.trackers.watching import make_watch

TARGET = "kvbench.report.trackers.wandb_logger.WandbLogger"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An empty folder, and W&B as a new process finds it: it reads its environment once."""
    import wandb

    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "argv", ["kvbench"])
    monkeypatch.chdir(tmp_path)
    wandb.teardown()
    yield
    wandb.teardown()


def told(place: Path) -> dict[str, OfflineRun]:
    """All offline runs by id; each only once."""
    runs = left(place)
    assert len({run.id for run in runs}) == len(runs)
    return {run.id: run for run in runs}


def left(place: Path) -> list[OfflineRun]:
    """What a process leaves when it ends: W&B's own one may write a little longer than it says."""
    import wandb

    wandb.teardown()
    return offline_runs(place)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_a_sweep_is_a_run_per_cell_and_one_of_its_own(tmp_path: Path, tiny_model: Path) -> None:
    out = tmp_path / "mine"
    asked = [("streamingllm", 40), ("streamingllm", 80), ("full", 40)]
    cells = [small_cell(out, tiny_model, policy, budget, "engine.rows=1") for policy, budget in asked]
    node = {"_target_": TARGET, "project": "caches", "entity": "lab", "tags": ["a", "b"], "folder": str(out)}

    def sweep() -> None:
        watch = make_watch(node, "mine")
        watch.close([read_result(ending.folder) for ending in run_cells(cells, watch) if ending.folder])

    sweep()
    found = told(tmp_path / "mine")
    folders = {cell.run_id: cell.folder for cell in cells}
    assert set(found) == {*folders, "sweep-mine"}
    for name, folder in folders.items():
        run, wrote = found[name], lines(folder)
        assert (run.project, run.entity, run.group, run.job_type, run.tags) == (
            "caches",
            "lab",
            "mine",
            "niah",
            ("a", "b"),
        )
        assert run.exit_code == 0
        assert run.column("_step") == [0, 1, 2]
        assert run.column("example/score") == [line["score"] for line in wrote]
        assert run.column("example/kept_tokens") == [
            fmean(n for layer in line["kept_tokens"] for n in layer) for line in wrote
        ]
        for column in ("cache_bytes", "peak_bytes", "prefill_seconds", "decode_seconds"):
            assert run.column(f"example/{column}") == [line[column] for line in wrote], column
        assert run.column("score") == [fmean(line["score"] for line in wrote[: n + 1]) for n in range(3)]
        assert not [key for key in run.summary if key.startswith("example/")], "the last example's is no result"
        table = run.table("examples")
        assert [row["prompt_hash"] for row in table] == [line["prompt_hash"] for line in wrote]
        assert [row["output"] for row in table] == [line["output"] for line in wrote]
        assert [row["depth"] for row in table] == [0.0, 0.5, 1.0]
        assert {row["length"] for row in table} == {300}
        metrics = json.loads((folder / "metrics.json").read_text())
        for key in ("score", "score_low", "score_high", "kept_tokens", "cache_bytes", "prefill_seconds", "n"):
            assert run.summary[key] == metrics[key], key
        assert ("score_vs_full" in run.summary) == ("streamingllm" in name)
    tight = found[next(name for name in folders if "streamingllm-40" in name)].config
    assert (tight["model"], tight["policy"], tight["budget"], tight["task"]) == (
        tiny_model.name,
        "streamingllm",
        40,
        "niah",
    )
    assert (tight["seed"], tight["schedule"], tight["decode"], tight["compress"]) == (0, "prompt", "evict", "prompt")
    assert (tight["policy.scorer"], tight["policy.scorer.sinks"], tight["task.lengths"]) == ("Streaming", 4, [300])
    whole = found["sweep-mine"]
    assert (whole.title, whole.group, whole.job_type) == ("sweep-mine", "mine", "sweep")
    assert {row["run_id"] for row in whole.table("table")} == set(folders)
    assert {"budget", "bytes", "heatmap"} <= set(whole.summary)
    for picture in ("budget", "bytes", "heatmap"):
        assert (whole.folder / "files" / whole.summary[picture]["path"]).read_bytes().startswith(b"\x89PNG")

    sweep()
    assert set(told(tmp_path / "mine")) == set(found), "a rerun of what is complete logs nothing new"


@pytest.mark.slow
def test_the_command_line_tells_wandb_of_a_sweep(tmp_path: Path, tiny_model: Path) -> None:
    command = ["-m", f"model={tiny_model}", "policy=streamingllm,full", "budget=40,80", *SMALL, "out=mine"]
    assert main([*command, "logger=wandb"]) == 0
    found = told(tmp_path / "mine")
    assert set(found) == {*(path.parent.name for path in Path("mine").glob("*/samples.jsonl")), "sweep-mine"}
    assert {run.group for run in found.values()} == {"mine"}
    assert main([*command, "logger=wandb"]) == 0
    assert set(told(tmp_path / "mine")) == set(found)


@pytest.mark.slow
def test_a_killed_run_goes_on_in_wandb_where_it_was_without_a_gap_or_a_point_twice(tmp_path: Path) -> None:
    task = ("task.lengths=[1000]", "task.repeats=1", "policy=caote_snapkv", "budget=40")
    command = [sys.executable, "-m", "kvbench", *task, "out=o", "logger=wandb"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    victim = subprocess.Popen(command, env=environment)
    deadline = time.monotonic() + 120
    while not any(path.read_bytes().count(b"\n") >= 4 for path in tmp_path.glob("o/*/samples.jsonl")):
        assert victim.poll() is None
        assert time.monotonic() < deadline
    victim.kill()
    victim.wait()
    assert subprocess.run(command, env=environment, check=False).returncode == 0
    first, second = offline_runs(tmp_path / "o")
    assert first.exit_code is None
    assert second.exit_code == 0
    assert first.column("_step") + second.column("_step") == list(range(10))
    assert len(second.table("examples")) == 10


def logger(place: Path) -> WandbSettings:
    place.mkdir(exist_ok=True)
    return WandbSettings(folder=str(place)).resolved()


class Replayed(Cell):
    """A cell whose results lie on disk already: what a watch asks of it is read from there."""

    def __init__(self, folder: Path) -> None:
        (self.__dict__["record"],) = load_results(folder)

    run_id = property(lambda self: self.record.run_id)
    folder = property(lambda self: self.record.folder)
    identity = property(lambda self: self.record.identity)
    naming = property(lambda self: Naming(self.record.policy.split()[0], "pocket", "niah"))

    @property
    def device(self) -> Any:
        import torch

        return torch.device("cpu")


def written(out: Path, policy: str, scores: list[float | None], budget: int | None = 64) -> Replayed:
    return Replayed(write_run(out, policy, [sample(i, score) for i, score in enumerate(scores)], budget))


def test_cells_in_step_have_their_own_curves_and_the_difference_to_full_whichever_ends_first(tmp_path: Path) -> None:
    tova = written(tmp_path, "tova", [1.0, 0.0, 0.0])
    full = written(tmp_path, "full", [1.0, 1.0, 0.0], None)
    watch = WandbWatch(logger(tmp_path / "w"), "both")
    for cell in (tova, full):
        watch.started(cell, (), 4)
    for index in range(3):
        for cell in (tova, full):
            watch.finished(cell, cell.record.samples[index])
    for cell in (tova, full):
        watch.ended(cell, None)
    watch.close()
    found = told(tmp_path / "w")
    assert set(found) == {tova.run_id, full.run_id}, "a share of a sweep does not speak for the whole"
    assert found[tova.run_id].column("score") == [1.0, 0.5, pytest.approx(1 / 3)]
    assert found[full.run_id].column("score") == [1.0, 1.0, pytest.approx(2 / 3)]
    summary = found[tova.run_id].summary
    assert summary["score_vs_full"] == pytest.approx(-1 / 3)
    assert summary["score_vs_full_low"] < -1 / 3 < summary["score_vs_full_high"]
    assert "score_vs_full" not in found[full.run_id].summary


def test_a_resumed_cell_continues_its_run_at_the_next_example(tmp_path: Path) -> None:
    cell = written(tmp_path, "tova", [1.0, 0.0, 1.0, 0.0])
    samples = cell.record.samples
    watch = WandbWatch(logger(tmp_path / "w"), "s")
    watch.started(cell, (), 4)
    for one in samples[:2]:
        watch.finished(cell, one)
    watch.close()  # as Ctrl-C leaves it
    watch = WandbWatch(logger(tmp_path / "w"), "s")
    watch.started(cell, samples[:3], 4)  # the third was on disk, but W&B had not heard of it
    watch.finished(cell, samples[3])
    watch.ended(cell, None)
    watch.close()
    first, second = sorted(left(tmp_path / "w"), key=lambda run: run.exit_code != 130)
    assert (first.id, second.id) == (cell.run_id, cell.run_id)
    assert (first.exit_code, second.exit_code) == (130, 0)
    assert (first.column("_step"), second.column("_step")) == ([0, 1], [2, 3])
    assert second.column("score") == [pytest.approx(2 / 3), 0.5]
    assert len(second.table("examples")) == 4
    assert "examples" not in first.summary


def test_a_cell_that_failed_says_so_and_one_that_computed_nothing_says_nothing(tmp_path: Path) -> None:
    cell, other = written(tmp_path / "a", "tova", [1.0, None]), written(tmp_path / "b", "h2o", [1.0])
    watch = WandbWatch(logger(tmp_path / "w"), None)
    watch.started(cell, (), 4)
    watch.finished(cell, cell.record.samples[0])
    watch.ended(cell, OSError("no space"))
    watch.ended(other, None)
    watch.close()
    (run,) = told(tmp_path / "w").values()
    assert (run.exit_code, run.summary["error"], run.group) == (1, "OSError: no space", "")


def test_a_run_with_failed_examples_is_a_failed_run_with_no_score(tmp_path: Path) -> None:
    cell = written(tmp_path, "tova", [1.0, None])
    watch = WandbWatch(logger(tmp_path / "w"), None)
    watch.started(cell, cell.record.samples, 2)
    watch.ended(cell, None)
    watch.close([cell.record])
    (run,) = told(tmp_path / "w").values()
    assert (run.exit_code, run.summary["n_failed"]) == (1, 1)
    assert run.history[-1]["n_failed"] == 1
    assert run.table("examples")[1]["error"].startswith("BudgetError")


def test_old_results_are_sent_once_and_with_a_later_full_once_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "old"
    tova = written(out, "tova", [1.0, 0.0])
    assert results(["wandb", str(out), "--tags", "x", "--project", "p"]) == 0
    assert capsys.readouterr().out.startswith("1 of 1 runs -> ")
    found = told(out)
    assert set(found) == {tova.run_id, "sweep-old"}
    run = found[tova.run_id]
    assert (run.project, run.group, run.tags, run.job_type) == ("p", "old", ("x",), "niah")
    assert run.column("score") == [1.0, 0.5]
    assert "score_vs_full" not in run.summary
    assert results(["wandb", str(out), "--project", "p"]) == 0
    assert capsys.readouterr().out.startswith("0 of 1 runs -> ")
    assert len(left(out)) == 2

    full = written(out / "more", "full", [1.0, 1.0], None)
    assert results(["wandb", str(out), "--project", "p"]) == 0
    assert capsys.readouterr().out.startswith("2 of 2 runs -> ")
    again = [run for run in left(out) if run.id in (tova.run_id, full.run_id)][1:]
    assert sorted(len(run.history) for run in again) == [0, 2], "no point of a curve is sent twice"
    assert any(run.summary.get("score_vs_full") == -0.5 for run in again)


def test_variables_of_wandb_are_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"PROJECT": "theirs", "ENTITY": "lab", "RUN_GROUP": "nightly", "TAGS": "t", "JOB_TYPE": "eval", "NOTES": "n"}
    for name, value in said.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    cell = written(tmp_path, "tova", [1.0])
    watch = WandbWatch(logger(tmp_path / "w"), "s")
    watch.send([cell.record], whole=False)
    (run,) = told(tmp_path / "w").values()
    assert (run.project, run.entity, run.group, run.tags, run.job_type) == ("theirs", "lab", "nightly", ("t",), "eval")


def test_an_id_is_as_long_as_wandb_allows_and_keeps_the_digest(tmp_path: Path) -> None:
    long = f"{'m' * 80}-snapkv-64-niah-0123456789"
    record = replace(written(tmp_path, "tova", [1.0]).record, run_id=long)
    watch = WandbWatch(logger(tmp_path / "w"), None)
    watch.send([record])
    (run,) = told(tmp_path / "w").values()
    assert len(run.id) == 64
    assert run.id.endswith("-0123456789")
    assert run.config["run_id"] == long


def test_an_error_of_wandb_changes_neither_results_nor_the_exit_code(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import wandb

    def broken(*_: Any, **__: Any) -> None:
        raise wandb.Error("the server is on fire")

    monkeypatch.setattr(wandb, "init", broken)
    command = [f"model={tiny_model}", "policy=streamingllm", "budget=40", *SMALL, "out=o", "logger=wandb"]
    with caplog.at_level(logging.WARNING):
        assert main(command) == 0
    assert "logger=wandb is told no more (Error: the server is on fire)" in caplog.text
    (folder,) = (path.parent for path in Path("o").glob("*/samples.jsonl"))
    assert len(read_samples(folder / "samples.jsonl")) == 3
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert results(["wandb", "o"]) == 0
    assert len(told(tmp_path / "o")) == 2


def test_a_wrong_setting_is_refused_before_the_first_example(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for sweep in ([], ["-m"]):
        assert main([*sweep, f"model={tiny_model}", *SMALL, "out=o", "logger=wandb", "logger.mode=never"]) == 2
        assert "logger.mode=never is not allowed, choose online, offline or disabled" in capsys.readouterr().err
    assert not list(tmp_path.glob("o/*/samples.jsonl"))
