"""Files that people touched: values no run can write are named with file and line, vanished files stop the run."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plotted_runs import sample as plotted_sample

from kvbench.cli import main
from kvbench.engine.batch import DecodeBatch
from kvbench.results.samples import Sample, open_samples, read_samples


def sample(index: int, **fields: Any) -> Sample:
    return replace(plotted_sample(index, 0.5), **fields)


def written(path: Path, *samples: Sample) -> Path:
    with open_samples(path) as file:
        for one in samples:
            file.append(one)
    return path


@pytest.mark.parametrize("score", [7, -0.5, float("nan")])
def test_a_score_no_run_writes_is_named_with_file_and_line(tmp_path: Path, score: float) -> None:
    path = written(tmp_path / "samples.jsonl", sample(0), sample(1))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[1]["score"] = score
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = path.read_bytes()
    with pytest.raises(
        ValueError, match=r"samples\.jsonl, line 2: score=.* is not allowed, it must be a number from 0"
    ):
        read_samples(path)
    with pytest.raises(ValueError, match="line 2"), open_samples(path):
        pass
    assert path.read_bytes() == before, "an edited line is no cut-off line: it is not thrown away"


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_run_whose_files_vanish_stops_at_once_in_one_sentence(
    what: str, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    calls, admit = [], DecodeBatch.admit_questions

    def and_then_they_are_gone(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            (path,) = tmp_path.glob("runs/*/samples.jsonl")
            shutil.rmtree(path.parent) if what == "folder" else path.unlink()
        return admit(*args, **kwargs)

    monkeypatch.setattr(DecodeBatch, "admit_questions", and_then_they_are_gone)
    small = ["task.lengths=[300]", "task.depths=[0.1,0.3,0.5,0.7,0.9]", "task.repeats=1", "task.max_new_tokens=2"]
    assert main([f"model={tiny_model}", "policy=full", "out=runs", "engine.rows=1", *small]) == 1
    said = capsys.readouterr()
    assert len(calls) == 2, "three more examples were not computed for nothing"
    assert "samples.jsonl was deleted or replaced while its run was computed" in said.err
    assert "Traceback" not in said.err
    assert said.out == ""


@pytest.mark.parametrize(
    ("field", "value"), [("prompt_hash", "0"), ("references", ["7"]), ("metadata", {}), ("max_new_tokens", 3)]
)
def test_a_run_of_other_data_is_refused(
    field: str, value: object, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [f"model={tiny_model}", "policy=full", f"out={tmp_path}", "task.lengths=[300]", "task.max_new_tokens=2"]
    assert main([*line, "limit=1"]) == 0
    (path,) = tmp_path.glob("*/samples.jsonl")
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}) + "\n")
    assert main([*line, "limit=2"]) == 1
    assert "(example 0 differs): the task's data has changed since" in capsys.readouterr().err
