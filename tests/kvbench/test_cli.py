"""`kvbench` as a user runs it: its exit code, what it prints and the files in `out`."""

import json
import os
import resource
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from shown_tables import shown_rows

from kvbench import BudgetError
from kvbench.cli import main
from kvbench.engine.batch import DecodeBatch

SECONDS = {"prefill_seconds", "decode_seconds"}
SMALL = ("task.lengths=[700]", "task.depths=[0.0,0.5,1.0]", "task.repeats=1", "task.max_new_tokens=8")


@dataclass(frozen=True)
class Done:
    """What a command left: exit code and what it said."""

    returncode: int
    stdout: str
    stderr: str


class Here:
    """Runs command lines in this process: the same code without seconds of imports each time."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capsys = capsys

    def __call__(self, *arguments: object) -> Done:
        self._capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Done(code, *self._capsys.readouterr())


@pytest.fixture
def here(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Here:
    """Run command lines in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return Here(tmp_path, capsys)


def on_a_full_disk(folder: Path, *arguments: object) -> Done:
    """A command line in a forked process, whose files cannot grow beyond 4,000 bytes."""
    child = os.fork()
    if child == 0:
        with (folder / "stderr").open("w") as said, redirect_stderr(said):
            resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
            code = main([str(argument) for argument in arguments])
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return Done(code, "", (folder / "stderr").read_text())


def samples(out: Path) -> list[dict[str, Any]]:
    """The samples of the only run in `out`, without seconds."""
    (path,) = out.glob("*/samples.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in SECONDS} for line in lines]


def test_one_run_leaves_its_files_and_a_table(here: Here, tiny_model: Path) -> None:
    arguments = (f"model={tiny_model}", "policy=snapkv", "budget=64", "out=deep/er", *SMALL)
    done = here(*arguments)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert [row[0] for row in shown_rows(done.stdout)] == ["snapkv"]
    assert "all decoded tokens kept" in done.stdout
    out = here.folder / "deep" / "er"
    (folder,) = out.iterdir()
    files = {"samples.jsonl", "metrics.json", "summary.json", "config.yaml", "environment.json", "engine.json"}
    assert {p.name for p in folder.iterdir()} == files
    assert [p.name for p in here.folder.iterdir()] == ["deep"]  # nothing of Hydra's lies about
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["run_id"] == folder.name
    assert config["config"]["budget"] == 64
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["packages"]["torch"]
    assert environment["model"]["class"] == "LlamaForCausalLM"
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["n"] == 3
    # prompt kept at 64, and 8 new tokens of which the last is never stored: 71 of every KV head, by hand
    assert metrics["kept_tokens"] == 71
    assert samples(out)[0]["kept_tokens"] == [[71, 71], [71, 71]]


def test_a_sweep_ends_with_one_table_and_goes_on_after_a_failed_cell(here: Here, tiny_model: Path) -> None:
    done = here("-m", f"model={tiny_model}", "policy=full,snapkv,caote_knorm", "budget=16,64", "out=runs", *SMALL)
    assert done.returncode == 1  # every failure was a wrong value: 16 is less than snapkv's window
    assert done.stderr.count("a budget of 16 tokens per KV head is too small for snapkv") == 1
    assert "1 of 6 runs failed" in done.stderr
    assert "Traceback" not in done.stderr
    rows = [row[0].split()[0] for row in shown_rows(done.stdout)]
    assert rows == ["full", "snapkv", "caote_knorm", "caote_knorm"]
    assert "vs full" in done.stdout
    others = {path.name for path in (here.folder / "runs").iterdir() if not path.name.startswith("tiny")}
    assert others == {"sweep.yaml", "multirun.yaml", ".sweep"}
    assert len(list((here.folder / "runs").glob("tiny*"))) == 4


def test_an_example_that_broke_its_budget_is_recorded_and_spoils_the_score(
    here: Here, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, admit = [], DecodeBatch.admit_questions

    def breaking(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise BudgetError("layer 0 holds 65 of 64")
        return admit(*arguments, **options)

    monkeypatch.setattr(DecodeBatch, "admit_questions", breaking)
    arguments = (f"model={tiny_model}", "policy=knorm", "budget=64", "out=runs", "engine.rows=1", *SMALL)
    done = here(*arguments)
    assert done.returncode == 1
    assert "1 of 3 examples failed" in done.stderr
    assert "none: 1 failed" in done.stdout
    assert len(calls) == 3
    (metrics,) = [json.loads(p.read_text()) for p in here.folder.glob("runs/*/metrics.json")]
    assert (metrics["n"], metrics["n_failed"], metrics["score"]) == (3, 1, None)
    assert [s["error"] for s in samples(here.folder / "runs")] == [None, "BudgetError: layer 0 holds 65 of 64", None]
    assert here(*arguments).returncode == 0  # the same command computes the failed example alone again
    assert len(calls) == 4
    assert [s["error"] for s in samples(here.folder / "runs")] == [None, None, None]


def test_a_full_disk_is_one_message_and_keeps_finished_examples(here: Here, tiny_model: Path) -> None:
    arguments = (f"model={tiny_model}", "policy=full", "out=runs", "task.lengths=[700]", "task.repeats=1")
    done = on_a_full_disk(here.folder, *arguments)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "no space left to write results" in done.stderr
    (path,) = here.folder.glob("runs/*/samples.jsonl")
    finished = path.read_bytes()
    assert finished.endswith(b"\n")
    assert finished.count(b"\n") >= 3
    assert here(*arguments).returncode == 0
    assert path.read_bytes().startswith(finished)
    assert path.read_bytes().count(b"\n") == 10
