"""What a dashboard is told, and that it can neither delay a run nor change what becomes of it."""

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from plotted_runs import sample
from small_cells import small_cell

from kvbench.analysis.result import Result
from kvbench.engine.run import run_cells
from kvbench.identity.cell import Cell
from kvbench.records.sample import Sample
from kvbench.report.trackers.run_info import history_row
from kvbench.report.trackers.wandb_settings import WandbSettings
from kvbench.report.trackers.watching import InThread, Quiet, make_watch
from kvbench.terminal.errors import UsageError


class Broken(Quiet):
    """A tracker that fails at one of its calls."""

    def __init__(self, call: str, error: BaseException) -> None:
        self.told: list[str] = []
        self._call, self._error = call, error

    def _take(self, call: str) -> None:
        self.told.append(call)
        if call == self._call:
            raise self._error

    def started(self, cell: Cell, done: Sequence[Sample], total: int) -> None:
        self._take("started")

    def finished(self, cell: Cell, sample: Sample) -> None:
        self._take("finished")

    def ended(self, cell: Cell, error: Exception | None) -> None:
        self._take("ended")

    def close(self, records: Sequence[Result] = ()) -> None:
        self._take("close")


CALLS = ["started", "finished", "finished", "finished", "ended", "close"]


def test_a_tracker_hears_of_a_cell_its_examples_and_the_end_in_order(tmp_path: Path, tiny_model: Path) -> None:
    broken = Broken("never", ValueError())
    watch = InThread(broken, "some", patience=60)
    (ending,) = run_cells([small_cell(tmp_path, tiny_model)], watch)
    watch.close()
    assert ending.error is None
    assert broken.told == CALLS
    watch.close()
    assert broken.told == CALLS, "closing twice does nothing"


@pytest.mark.parametrize("call", ["started", "finished", "ended", "close"])
@pytest.mark.parametrize("error", [RuntimeError("no network\nmore"), SystemExit(3)], ids=["error", "exit"])
def test_a_tracker_that_throws_is_one_warning_and_changes_nothing(
    call: str, error: BaseException, tmp_path: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Broken(call, error)
    watch = InThread(broken, "some", patience=60)
    (ending,) = run_cells([small_cell(tmp_path, tiny_model)], watch)
    watch.close()
    assert ending.error is None
    assert len((ending.folder / "samples.jsonl").read_text().splitlines()) == 3
    assert broken.told == CALLS[: CALLS.index(call) + 1], "after its first error it is told nothing more"
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.startswith(f"logger=some is told no more ({type(error).__name__}: ")
    assert warning.endswith("results are complete in out, and `python -m kvbench.results some DIR` sends them")


def test_a_tracker_that_hangs_holds_up_the_end_for_its_patience_at_most(caplog: pytest.LogCaptureFixture) -> None:
    stuck = threading.Event()

    class Hanging(Quiet):
        def close(self, records: Sequence[Result] = ()) -> None:
            stuck.wait(60)

    watch = InThread(Hanging(), "some", patience=0.1)
    watch.close()
    stuck.set()
    assert "logger=some still sends after 0.1 s" in caplog.text


def test_the_running_score_is_that_of_all_examples_so_far_and_ends_with_the_first_failure() -> None:
    made = [sample(0, 1.0), sample(1, 0.0), sample(2, None), sample(3, 1.0)]
    rows = [history_row(made[: n + 1]) for n in range(4)]
    assert [row.get("score") for row in rows] == [1.0, 0.5, None, None]
    assert (rows[1]["score_low"], rows[1]["score_high"]) == pytest.approx((0.0945, 0.9055), abs=1e-4)  # Wilson, 1 of 2
    assert [row["n_failed"] for row in rows] == [0, 0, 1, 1]
    assert rows[0]["example/kept_tokens"] == 15  # of heads that hold 10 and 20
    assert (rows[0]["example/cache_bytes"], rows[1]["example/score"]) == (2**20, 0.0)
    assert "example/score" not in rows[2]


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """W&B as a new process finds it: it reads its environment once."""
    import wandb

    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    wandb.teardown()
    yield monkeypatch
    wandb.teardown()


TARGET = "kvbench.report.trackers.wandb_logger.WandbLogger"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"mode": "sometimes"}, "logger.mode=sometimes is not allowed, choose online, offline or disabled"),
        ({"project": "a/b"}, "logger: W&B refuses its settings: Invalid project name 'a/b'"),
        ({"folder": "/proc/none", "mode": "offline"}, "logger.folder=/proc/none cannot be made"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_is_computed(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        make_watch({"_target_": TARGET, **fields}, "sweep")
    assert sentence in str(refused.value)


def test_fields_win_over_variables_and_tags_add_up(
    tmp_path: Path, fresh: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in {"PROJECT": "theirs", "ENTITY": "lab", "TAGS": "a,b", "MODE": "dryrun", "NAME": "all"}.items():
        fresh.setenv(f"WANDB_{name}", value)
    known = WandbSettings(folder=str(tmp_path), tags=["b", "c"]).resolved()
    assert (known.project, known.entity, known.tags, known.mode) == ("theirs", "lab", ("a", "b", "c"), "offline")
    assert "WANDB_NAME is not used" in caplog.text
    assert WandbSettings(project="ours", folder=str(tmp_path)).resolved().project == "ours"
