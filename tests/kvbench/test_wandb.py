"""What W&B is told during a run, of a sweep, after an interrupt and in a rerun; once with W&B's own files."""

import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from plotted_runs import sample, write_run
from small_cells import SMALL, small_cell

from kvbench.analysis.load import read_result
from kvbench.cli import main
from kvbench.engine.run import run_cells
from kvbench.identity.cell import Cell
from kvbench.records.samples import read_samples
from kvbench.report.command import main as results
from kvbench.report.trackers.run_info import example_table
from kvbench.report.trackers.wandb_settings import WandbSettings
from kvbench.report.trackers.wandb_watch import WandbWatch
from kvbench.report.trackers.watching import make_watch

TARGET = "kvbench.report.trackers.wandb_logger.WandbLogger"


@dataclass
class Run:
    """A run of W&B that keeps what it is told."""

    given: dict[str, Any]
    resumed: bool = False
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["given"][name]

    def define_metric(self, *_: Any, **__: Any) -> None:
        """Summaries are whatever they are told."""

    def log(self, row: dict[str, Any], step: int = 0, commit: bool = True) -> None:
        self.history.append({"_step": step, **row})

    def finish(self, exit_code: int = 0) -> None:
        self.exit_code = exit_code

    def column(self, name: str) -> list[Any]:
        return [row[name] for row in self.history]

    def table(self, name: str) -> list[dict[str, Any]]:
        found = self.summary.get(name) or self.history[-1][name]
        return [dict(zip(found.columns, row, strict=True)) for row in found.data]


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


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """The runs that W&B is asked to begin, in their order."""
    import wandb

    begun: list[Run] = []

    def init(**given: Any) -> Run:
        (Path(given["dir"]) / "wandb").mkdir(exist_ok=True)  # where W&B's files would lie
        begun.append(Run(given))
        return begun[-1]

    monkeypatch.setattr(wandb, "init", init)
    return begun


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_a_sweep_is_a_run_per_cell_and_one_of_its_own(tmp_path: Path, tiny_model: Path, told: list[Run]) -> None:
    out = tmp_path / "mine"
    asked = [("streamingllm", 40), ("streamingllm", 80), ("full", 40)]
    cells = [small_cell(out, tiny_model, policy, budget, "engine.rows=1") for policy, budget in asked]
    node = {"_target_": TARGET, "project": "caches", "entity": "lab", "tags": ["a", "b"], "folder": str(out)}

    def sweep() -> None:
        watch = make_watch(node, "mine")
        watch.close([read_result(ending.folder) for ending in run_cells(cells, watch) if ending.folder])

    sweep()
    found = {run.id: run for run in told}
    assert set(found) == {*(cell.run_id for cell in cells), "sweep-mine"}
    assert len(found) == len(told)
    for cell in cells:
        run, wrote = found[cell.run_id], lines(cell.folder)
        assert (run.project, run.entity, run.group, run.job_type) == ("caches", "lab", "mine", "niah")
        assert (tuple(run.tags), run.exit_code) == (("a", "b"), 0)
        assert run.column("_step") == [0, 1, 2]
        kept = [fmean(n for layer in line["kept_tokens"] for n in layer) for line in wrote]
        assert run.column("example/kept_tokens") == kept
        for column in ("score", "cache_bytes", "peak_bytes", "prefill_seconds", "decode_seconds"):
            assert run.column(f"example/{column}") == [line[column] for line in wrote], column
        assert run.column("score") == [fmean(line["score"] for line in wrote[: n + 1]) for n in range(3)]
        table = run.table("examples")
        for column in ("prompt_hash", "output"):
            assert [row[column] for row in table] == [line[column] for line in wrote]
        assert ([row["depth"] for row in table], {row["length"] for row in table}) == ([0.0, 0.5, 1.0], {300})
        metrics = json.loads((cell.folder / "metrics.json").read_text())
        for key in ("score", "score_low", "score_high", "kept_tokens", "cache_bytes", "prefill_seconds", "n"):
            assert run.summary[key] == metrics[key], key
        assert ("score_vs_full" in run.summary) == ("streamingllm" in cell.run_id)
    tight = found[cells[0].run_id].config
    assert (tight["model"], tight["policy"], tight["budget"]) == (tiny_model.name, "streamingllm", 40)
    assert (tight["schedule"], tight["policy.scorer.sinks"], tight["task.lengths"]) == ("prompt", 4, [300])
    whole = found["sweep-mine"]
    assert (whole.name, whole.group, whole.job_type) == ("sweep-mine", "mine", "sweep")
    assert {row["run_id"] for row in whole.table("table")} == {cell.run_id for cell in cells}
    assert {"budget", "bytes", "heatmap"} <= set(whole.history[0])

    sweep()
    assert len(told) == len(found), "a rerun of what is complete logs nothing new"


def logger(place: Path) -> WandbSettings:
    place.mkdir(exist_ok=True)
    return WandbSettings(folder=str(place)).resolved()


class Replayed(Cell):
    """A cell whose results lie on disk already: what a watch asks of it is read from there."""

    def __init__(self, folder: Path) -> None:
        self.__dict__["row"] = read_result(folder)

    run_id = property(lambda self: self.row.run_id)
    folder = property(lambda self: self.row.folder)
    identity = property(lambda self: self.row.identity)
    naming = property(lambda self: self.row.naming)

    @property
    def device(self) -> Any:
        import torch

        return torch.device("cpu")


def written(out: Path, policy: str, scores: list[float | None], budget: int | None = 64) -> Replayed:
    return Replayed(write_run(out, policy, [sample(i, score) for i, score in enumerate(scores)], budget))


def test_cells_in_step_have_their_own_curves_and_the_difference_to_full_whichever_ends_first(
    tmp_path: Path, told: list[Run]
) -> None:
    tova = written(tmp_path, "tova", [1.0, 0.0, 0.0])
    full = written(tmp_path, "full", [1.0, 1.0, 0.0], None)
    watch = WandbWatch(logger(tmp_path / "w"), "both")
    for cell in (tova, full):
        watch.started(cell, (), 4)
    for index in range(3):
        for cell in (tova, full):
            watch.finished(cell, cell.row.samples[index])
    for cell in (tova, full):
        watch.ended(cell, None)
    watch.close()
    assert [run.id for run in told] == [tova.run_id, full.run_id], "a share of a sweep does not speak for the whole"
    assert told[0].column("score") == [1.0, 0.5, pytest.approx(1 / 3)]
    assert told[1].column("score") == [1.0, 1.0, pytest.approx(2 / 3)]
    assert told[0].summary["score_vs_full"] == pytest.approx(-1 / 3)
    assert told[0].summary["score_vs_full_low"] < -1 / 3 < told[0].summary["score_vs_full_high"]
    assert "score_vs_full" not in told[1].summary


def test_the_table_numbers_the_answers_to_a_prompt_where_there_are_several() -> None:
    one, *several = sample(0, 1.0), *(replace(sample(i, 1.0), sample=i % 2) for i in range(4))
    columns, rows = example_table(several)
    assert [row[columns.index("sample")] for row in rows] == [0, 1, 0, 1]
    assert "sample" not in example_table([one])[0]


def test_a_resumed_cell_continues_its_run_at_the_next_example(tmp_path: Path, told: list[Run]) -> None:
    cell = written(tmp_path, "tova", [1.0, 0.0, 1.0, 0.0])
    samples = cell.row.samples
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
    first, second = told
    assert first.id == second.id == cell.run_id
    assert (first.exit_code, second.exit_code) == (130, 0)
    assert (first.column("_step"), second.column("_step")) == ([0, 1], [2, 3])
    assert second.column("score") == [pytest.approx(2 / 3), 0.5]
    assert len(second.table("examples")) == 4
    assert "examples" not in first.summary


def test_cells_that_failed_and_runs_with_failed_examples_say_so_and_what_computed_nothing_says_nothing(
    tmp_path: Path, told: list[Run]
) -> None:
    cell, other = written(tmp_path / "a", "tova", [1.0, None]), written(tmp_path / "b", "h2o", [1.0, None])
    watch = WandbWatch(logger(tmp_path / "w"), None)
    watch.started(cell, (), 4)
    watch.finished(cell, cell.row.samples[0])
    watch.ended(cell, OSError("no space"))
    watch.ended(other, None)
    (run,) = told
    assert (run.exit_code, run.summary["error"], run.group) == (1, "OSError: no space", None)
    watch.started(other, other.row.samples, 2)
    watch.ended(other, None)
    watch.close([other.row])
    _, run = told
    assert (run.exit_code, run.summary["n_failed"], run.history[-1]["n_failed"]) == (1, 1, 1)
    assert "score" not in run.summary
    assert run.table("examples")[1]["error"].startswith("BudgetError")


def test_old_results_are_sent_once_and_with_a_later_full_once_more(
    tmp_path: Path, told: list[Run], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "old"
    tova = written(out, "tova", [1.0, 0.0])
    for sent in ("1 of 1 runs -> ", "0 of 1 runs -> "):
        assert results(["wandb", str(out), "--tags", "x", "--project", "p"]) == 0
        assert capsys.readouterr().out.startswith(sent)
        assert [run.id for run in told] == [tova.run_id, "sweep-old"]
    run = told[0]
    assert (run.project, run.group, tuple(run.tags), run.job_type) == ("p", "old", ("x",), "niah")
    assert run.column("score") == [1.0, 0.5]
    assert "score_vs_full" not in run.summary

    full = written(out / "more", "full", [1.0, 1.0], None)
    assert results(["wandb", str(out), "--project", "p"]) == 0
    assert capsys.readouterr().out.startswith("2 of 2 runs -> ")
    again = {run.id: run for run in told[2:]}
    assert (len(again[tova.run_id].history), len(again[full.run_id].history)) == (0, 2), "no point is sent twice"
    assert again[tova.run_id].summary["score_vs_full"] == -0.5


def test_an_error_of_wandb_changes_neither_results_nor_the_exit_code(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, told: list[Run]
) -> None:
    import wandb

    def broken(*_: Any, **__: Any) -> None:
        raise wandb.Error("the server is on fire")

    command = [f"model={tiny_model}", "policy=streamingllm", "budget=40", *SMALL, "out=o", "logger=wandb"]
    with caplog.at_level(logging.WARNING), monkeypatch.context() as patched:
        patched.setattr(wandb, "init", broken)
        assert main(command) == 0
    assert "logger=wandb is told no more (Error: the server is on fire)" in caplog.text
    (folder,) = (path.parent for path in Path("o").glob("*/samples.jsonl"))
    assert len(read_samples(folder / "samples.jsonl")) == 3
    assert results(["wandb", "o"]) == 0
    assert [run.id for run in told] == [folder.name, "sweep-o"]
