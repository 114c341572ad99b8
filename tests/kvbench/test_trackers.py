"""What every tracker (`logger=`) gets of a run; and TensorBoard and MLflow themselves, where they are installed."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from plotted_runs import sample, write_run

from kvbench.cli import main
from kvbench.errors import UsageError
from kvbench.report.tracker import Opening, TrackerRun, Watch
from kvbench.results.loading import load_results
from kvbench.sweeps.compute import make_watch

TENSORBOARD = "kvbench.report.tensorboard_logger.TensorBoardLogger"
MLFLOW = "kvbench.report.mlflow_logger.MlflowLogger"


class Memory(TrackerRun):
    """A tracker that keeps in memory what it gets."""

    def __init__(self, opening: Opening, logged: int = 0) -> None:
        self.opening, self.logged = opening, logged
        self.steps: dict[int, Mapping[str, Any]] = {}
        self.tables: dict[str, tuple[Sequence[str], Sequence[Sequence[Any]]]] = {}
        self.pictures: list[str] = []

    def step(self, index: int, values: Mapping[str, Any]) -> None:
        self.steps[index] = values

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self.tables[name] = columns, rows

    def figures(self, paths: Sequence[Path]) -> None:
        self.pictures = [path.name for path in paths if path.read_bytes().startswith(b"\x89PNG")]

    def finish(self, summary: Mapping[str, Any], error: str | None = None, interrupted: bool = False) -> None:
        self.summary, self.error, self.interrupted = summary, error, interrupted


def two_runs(out: Path) -> None:
    write_run(out, "full", [sample(i, 1.0) for i in range(5)], None)
    write_run(out, "tova", [sample(i, score) for i, score in enumerate([1.0, 0.0, 0.0, 1.0, 0.0])], 64)


def test_a_tracker_gets_each_example_a_summary_and_the_table_of_the_sweep(tmp_path: Path) -> None:
    two_runs(tmp_path)
    opened: list[Memory] = []

    def open_run(opening: Opening) -> Memory:
        opened.append(Memory(opening, logged=2 if "tova" in opening.run_id else 0))
        return opened[-1]

    rows = load_results(tmp_path)
    watch = Watch(open_run, "both")
    for row in rows:
        watch.started(row, row.samples, row.n)
    watch.close(rows)
    found = {run.opening.title: run for run in opened}
    full, tova, sweep = (found[title] for title in ("pocket full niah", "pocket tova 64 niah", "sweep-both"))
    assert [*full.steps] == [0, 1, 2, 3, 4]
    assert [*tova.steps] == [2, 3, 4], "two examples were logged by an interrupted process"
    assert tova.steps[3]["score"] == 0.5
    assert (tova.summary["score"], tova.summary["score_vs_full"]) == (0.4, pytest.approx(-0.6))
    assert all(value is not None for value in tova.summary.values())
    assert len(tova.tables["examples"][1]) == 5
    assert (len(sweep.tables["table"][1]), full.error, full.interrupted) == (2, None, False)
    assert {"budget.png", "bytes.png"} <= set(sweep.pictures)
    assert len({run.opening.digest() for run in opened}) == 3


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_a_tracker_without_its_package_is_refused_before_anything_is_computed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("torch.utils.tensorboard", "tensorboard", "mlflow"):
        monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    with pytest.raises(UsageError, match=f"logger={name} needs a package .* not installed: pip install {name}"):
        make_watch({"_target_": {"tensorboard": TENSORBOARD, "mlflow": MLFLOW}[name]}, None)


def test_files_of_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    two_runs(tmp_path)
    for _ in range(2):  # the second time, the first files are hidden
        assert main(["results", "log", str(tmp_path), "logger=tensorboard"]) == 0
    runs = {}
    for folder in (tmp_path / "tensorboard").iterdir():
        runs[folder.name] = EventAccumulator(str(folder)).Reload()
    assert len(runs) == 3
    (tova,) = (run for name, run in runs.items() if "tova" in name)
    assert [(event.step, event.value) for event in tova.Scalars("score")][:2] == [(0, 1.0), (1, 0.5)]
    assert len(tova.Scalars("score")) == 5
    assert tova.Scalars("summary/score_vs_full")[0].value == pytest.approx(-0.6)
    assert "_hparams_/session_start_info" in tova.PluginTagToContent("hparams")
    (sweep,) = (run for name, run in runs.items() if name.startswith("sweep-"))
    assert {"budget", "bytes"} <= set(sweep.Tags()["images"])
    assert "table/text_summary" in sweep.Tags()["tensors"]


def test_runs_of_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")

    monkeypatch.chdir(tmp_path)  # MLflow writes artifacts here
    two_runs(tmp_path)
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    for _ in range(2):  # the second time, nothing is logged twice
        command = ["results", "log", str(tmp_path), "logger=mlflow", f"logger.tracking_uri={uri}"]
        assert main([*command, "logger.experiment=e"]) == 0
    client = mlflow.MlflowClient(tracking_uri=uri)
    found = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    runs = {run.info.run_name: run for run in found}
    assert len(found) == len(runs) == 3
    tova = runs["pocket tova 64 niah"]
    assert (tova.info.status, tova.data.params["policy"], tova.data.params["budget"]) == ("FINISHED", "tova", "64")
    assert tova.data.metrics["summary/score_vs_full"] == pytest.approx(-0.6)
    assert [metric.value for metric in client.get_metric_history(tova.info.run_id, "score")][:2] == [1.0, 0.5]
    assert len(client.get_metric_history(tova.info.run_id, "score")) == 5
    files = {file.path for run in found for file in client.list_artifacts(run.info.run_id)}
    assert {"examples.json", "table.json", "figures"} <= files
