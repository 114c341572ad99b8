"""`kvbench` as a user runs it: its exit code, what it prints and the files in `out`."""

import json
import os
import resource
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import yaml
from shown_tables import shown_rows
from small_cells import only

from kvbench import BudgetError
from kvbench.cli import main
from kvbench.engine.batch import DecodeBatch

Here = Callable[..., tuple[int, str, str]]
SMALL = ("task.lengths=[300]", "task.depths=[0.0,0.5,1.0]", "task.repeats=1", "task.max_new_tokens=8")


def test_one_run_leaves_its_files_and_a_table(here: Here) -> None:
    arguments = ("policy=snapkv", "budget=64", "out=deep/er", *SMALL)
    code, shown, said = here(*arguments)
    assert code == 0
    assert "Traceback" not in said
    assert [row[0] for row in shown_rows(shown)] == ["snapkv"]
    assert "all decoded tokens kept" in shown
    out = Path("deep/er")
    (folder,) = out.iterdir()
    files = {"samples.jsonl", "metrics.json", "summary.json", "config.yaml", "environment.json", "engine.json"}
    assert {p.name for p in folder.iterdir()} == files
    assert [p.name for p in Path.cwd().iterdir()] == ["deep"]  # nothing of Hydra's lies about
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
    assert only(out)[0]["kept_tokens"] == [[71, 71], [71, 71]]


def test_a_sweep_ends_with_one_table_and_goes_on_after_a_failed_cell(here: Here) -> None:
    code, shown, said = here("-m", "policy=full,snapkv,caote_knorm", "budget=16,64", "out=runs", *SMALL)
    assert code == 1  # what failed was refused: 16 is less than snapkv's window
    assert said.count("kvbench: policy=snapkv budget=16: a budget of 16 tokens per KV head is too small") == 1
    assert "1 of 6 runs failed" in said
    assert "Traceback" not in said
    rows = [row[0].split()[0] for row in shown_rows(shown)]
    assert rows == ["full", "snapkv", "caote_knorm", "caote_knorm"]
    assert "vs full" in shown
    others = {path.name for path in Path("runs").iterdir() if not path.name.startswith("tiny")}
    assert others == {"sweep.yaml", "multirun.yaml", ".sweep"}
    assert len(list(Path("runs").glob("tiny*"))) == 4


def test_an_example_that_broke_its_budget_is_recorded_and_spoils_the_score(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, admit = [], DecodeBatch.admit

    def breaking(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise BudgetError("layer 0 holds 65 of 64")
        return admit(*arguments, **options)

    monkeypatch.setattr(DecodeBatch, "admit", breaking)
    arguments = ("policy=knorm", "budget=64", "out=runs", "engine.rows=1", *SMALL)
    code, shown, said = here(*arguments)
    assert code == 1
    assert "1 of 3 examples failed" in said
    assert "none: 1 failed" in shown
    assert len(calls) == 3
    (metrics,) = [json.loads(p.read_text()) for p in Path.cwd().glob("runs/*/metrics.json")]
    assert (metrics["n"], metrics["n_failed"], metrics["score"]) == (3, 1, None)
    assert [s["error"] for s in only(Path("runs"))] == [None, "BudgetError: layer 0 holds 65 of 64", None]
    assert here(*arguments)[0] == 0  # the same command computes the failed example alone again
    assert len(calls) == 4
    assert [s["error"] for s in only(Path("runs"))] == [None, None, None]


def test_a_full_disk_is_one_message_and_keeps_finished_examples(here: Here, tiny_model: Path) -> None:
    arguments = ("policy=full", "out=runs", "task.lengths=[400]", "task.repeats=1")
    child = os.fork()
    if child == 0:
        with Path("stderr").open("w") as file, redirect_stderr(file):
            resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
            code = main([f"model={tiny_model}", *arguments])
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    said = Path("stderr").read_text()
    assert "Traceback" not in said
    assert "no space left to write results" in said
    (path,) = Path.cwd().glob("runs/*/samples.jsonl")
    finished = path.read_bytes()
    assert finished.endswith(b"\n")
    assert finished.count(b"\n") >= 3
    assert here(*arguments)[0] == 0
    assert path.read_bytes().startswith(finished)
    assert path.read_bytes().count(b"\n") == 10
