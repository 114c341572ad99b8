"""Files that people touched: vanished files stop the run, and samples of other data are refused."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvbench.cli import main
from kvbench.engine import compute
from kvbench.engine.batch import DecodeBatch
from kvbench.models import loading
from kvbench.results.__main__ import main as results
from kvbench.sweep import main as sweep
from kvbench.tasks.niah import Niah


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_run_whose_files_vanish_stops_at_once_in_one_sentence(
    what: str, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    calls, admit = [], DecodeBatch.admit

    def and_then_they_are_gone(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            (path,) = tmp_path.glob("runs/*/samples.jsonl")
            shutil.rmtree(path.parent) if what == "folder" else path.unlink()
        return admit(*args, **kwargs)

    monkeypatch.setattr(DecodeBatch, "admit", and_then_they_are_gone)
    small = ["task.lengths=[300]", "task.depths=[0.1,0.3,0.5,0.7,0.9]", "task.repeats=1", "task.max_new_tokens=2"]
    assert main([f"model={tiny_model}", "policy=full", "out=runs", "engine.rows=1", *small]) == 1
    said = capsys.readouterr()
    assert len(calls) == 2, "three more examples were not computed for nothing"
    assert "samples.jsonl was deleted or replaced while its run was computed" in said.err
    assert "Traceback" not in said.err
    assert said.out == ""


@pytest.mark.parametrize(
    ("what", "when"),
    [
        *(("model.safetensors", "while"), ("config.json", "before")),
        ("data", "while"),  # its files are read
    ],
)
def test_a_run_whose_model_or_data_is_replaced_ends_before_its_first_example(
    what: str, when: str, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    model, data = Path(shutil.copytree(tiny_model, tmp_path / "model")), tmp_path / "rows.jsonl"
    rows = [{"context": f"{i} pens. " * 30, "question": f"Box {i}?", "answer": [str(i)]} for i in range(2)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = data if what == "data" else model / what
    module, reader = (compute, "prompts_for") if what == "data" else (loading, "_load")
    original = getattr(module, reader)

    def replaced(*arguments: Any) -> Any:
        found = original(*arguments) if when == "while" else None
        times, content = path.stat(), path.read_bytes()
        path.unlink()
        changed = {"data": content.replace(b"pens", b"cups"), "model.safetensors": content[:-1] + b"\1"}
        path.write_bytes(changed.get(what, content + b"\n"))
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        return found or original(*arguments)

    monkeypatch.setattr(module, reader, replaced)
    words = [f"model={model}", "policy=full", f"out={tmp_path / 'runs'}", "task=context_question"]
    assert main(["-m", *words, f"task.data_dir={data}", "task.max_new_tokens=2"]) == 1
    said = capsys.readouterr().err
    assert "a file that it reads has changed since the sweep started; run its command again" in said
    assert "Traceback" not in said
    assert not [path for path in tmp_path.glob("runs/*/samples.jsonl") if path.stat().st_size]
    monkeypatch.undo()
    assert main(["-m", *words, f"task.data_dir={data}", "task.max_new_tokens=2"]) == 0
    assert len([*tmp_path.glob("runs/*/samples.jsonl")]) == 1


def test_an_error_of_a_scorer_fails_its_example_and_names_it(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = Niah.judge

    def broken(self: Niah, output: str, example: Any) -> Any:
        if example.index == 1:
            raise ZeroDivisionError("no words")
        return judge(self, output, example)

    monkeypatch.setattr(Niah, "judge", broken)
    line = ["-m", "policy=full,snapkv", "budget=64", f"model={tiny_model}", f"out={tmp_path}", "limit=3"]
    assert main([*line, "task.lengths=[300]", "task.max_new_tokens=2"]) == 1
    assert "1 of 3 examples failed" in capsys.readouterr().err
    for path in tmp_path.glob("*/samples.jsonl"):
        errors = [json.loads(text)["error"] for text in path.read_text().splitlines()]
        assert errors[0] is errors[2] is None
        assert "example 1 of task niah could not be scored: ZeroDivisionError: no words" in errors[1]


def test_a_smaller_limit_shows_all_examples_of_a_run(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [f"model={tiny_model}", f"out={tmp_path}", "task.lengths=[300]", "task.max_new_tokens=2"]
    for words in (["policy=full"], ["-m", "policy=full,snapkv", "budget=64"]):
        assert main([*words, *line, "limit=6"]) == 0
        capsys.readouterr()
        assert main([*words, *line, "limit=2"]) == 0
        assert "6 examples" in capsys.readouterr().out
    assert sweep(["status", str(tmp_path)]) == 0
    assert "6/6" in (said := capsys.readouterr().out)
    assert "/2" not in said
    assert results(["collect", str(tmp_path)]) == 0
    assert "6 examples" in capsys.readouterr().out


def test_a_run_of_other_data_is_refused(tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = [f"model={tiny_model}", "policy=full", f"out={tmp_path}", "task.lengths=[300]", "task.max_new_tokens=2"]
    assert main([*line, "limit=1"]) == 0
    (path,) = tmp_path.glob("*/samples.jsonl")
    sample = json.loads(path.read_text())
    for changed in ({"prompt_hash": "0"}, {"references": ["7"]}, {"metadata": {}}, {"max_new_tokens": 3}):
        path.write_text(json.dumps(sample | changed) + "\n")
        assert main([*line, "limit=2"]) == 1
        assert "(example 0 differs): the task's data has changed since" in capsys.readouterr().err, changed
