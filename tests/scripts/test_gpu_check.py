"""The check of a new GPU, as far as it runs without one."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import gpu_check


def test_a_dry_run_times_policies_against_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found.json"
    assert gpu_check.main(["speed", "--dry", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    for slug, _, _ in gpu_check.SPEED:
        assert f"speed: {slug}, prefill of 256 tokens over transformers: " in said
    assert "HOLD" not in said, "times of a dry run mean nothing"
    written = json.loads(out.read_text())
    assert {result["part"] for result in written["results"]} == {"speed"}
    assert written["environment"]["packages"]["torch"]


@pytest.mark.slow("runs policies twice, in processes of their own")
def test_a_dry_run_compares_policies_of_two_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "found.json")
    assert gpu_check.main(["policies", "--dry", "--policies", "h2o,snapkv", "--out", out]) == 0
    said = capsys.readouterr().out
    assert "float32: compared samples: 2" in said
    assert "float32: other kept positions than on the CPU, of 2: 0" in said


@pytest.mark.parametrize(("value", "code"), [(0.99, 1), (1.0, 0)])
def test_a_bound_that_does_not_hold_is_a_failure(
    value: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(visit: Any) -> Iterator[gpu_check.Result]:
        yield gpu_check.Result("share", "share", value, ">=", 1)

    monkeypatch.setattr(gpu_check, "PARTS", {"share": measured})
    monkeypatch.setattr(gpu_check, "write", lambda *_: None)
    assert gpu_check.main(["share", "--out", str(tmp_path / "found.json")]) == code
    assert ("DOES NOT HOLD" in capsys.readouterr().out) == bool(code)


def test_other_samples_than_on_the_cpu_are_counted_by_policy(tmp_path: Path) -> None:
    for device, output in {"cuda": " 12", "cpu": " 13"}.items():
        for run, said in {"pocket-h2o-96-niah-0a": output, "pocket-knorm-96-niah-0b": " 7"}.items():
            folder = tmp_path / device / run
            folder.mkdir(parents=True)
            sample = {"index": 0, "output": said, "cache_bytes": 1, "kept_tokens": [[1]], "kept_heads": [[0, 1]]}
            (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    found = {one.name: one.value for one in gpu_check.compared("float32", tmp_path / "cuda", tmp_path / "cpu")}
    assert found["float32: other outputs than on the CPU, of 2"] == 1
    assert found["float32: other outputs"] == "pocket-h2o-96-niah"
    assert found["float32: other bytes than on the CPU, of 2"] == 0
