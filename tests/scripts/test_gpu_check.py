"""The check of a new GPU, as far as it runs without one."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import gpu_check


def run(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """The results of a run in small by their names; every part that is named must have some, and none may fail."""
    out = tmp_path / "found.json"
    assert gpu_check.main([*arguments, "--tiny", "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    assert written["environment"]["packages"]["torch"]
    assert {result["part"] for result in written["results"]} == set(arguments[1].split(","))
    return {result["name"]: result["value"] for result in written["results"]}


@pytest.mark.slow("runs the model many times")
def test_batches_and_blocks_run_in_small_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(tmp_path, "--parts", "batches,block")
    for slug in gpu_check.BATCHED:
        assert "of the bound" in found[f"{slug}, 256 tokens, batch 2"]
    alone, several = (
        found[f"{title} in blocks of 16, for each: operations, views included per layer and block"]
        for title in ("1 prompt", "2 prompts")
    )
    assert 0 < several < alone, "prompts share the operations of a block"
    assert "HOLD" not in capsys.readouterr().out, "times of a run in small mean nothing"


@pytest.mark.slow("runs the model many times")
@pytest.mark.parametrize("part", ["speed", "sweep", "stores", "long", "compile"])
def test_every_other_part_runs_in_small(part: str, tmp_path: Path) -> None:
    found = run(tmp_path, "--parts", part)
    expected = {
        "speed": [f"{slug}, decoded token, ms" for slug, _, _ in gpu_check.SPEED],
        "sweep": ["36 variants over single runs"],
        "stores": [f"{slug} at 256, decoded token over full" for slug in gpu_check.STORES],
        "long": ["h2o, prefill of 1024 tokens over transformers", "cake, decoded token, ms"],
        "compile": ["seconds at the start", "full, batch 2, of the bound"],
    }
    assert set(expected[part]) <= found.keys()


def test_an_unknown_part_is_refused_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_check.main(["--parts", "speeed"])
    assert "no such part: speeed (allowed: equal, tests, speed, " in capsys.readouterr().err


@pytest.mark.slow("runs policies twice, in processes of their own")
def test_a_run_in_small_compares_policies_twice(tmp_path: Path) -> None:
    found = run(tmp_path, "--parts", "equal", "--policies", "h2o,snapkv")
    assert found["float32: compared samples"] == 2
    assert found["float32: other kept positions than on the CPU, of 2"] == 0


@pytest.mark.parametrize(("value", "code"), [(0.99, 1), (1.0, 0)])
def test_a_bound_that_does_not_hold_is_a_failure(
    value: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(visit: Any) -> Iterator[gpu_check.Result]:
        yield gpu_check.Result("share", "share", value, ">=", 1)

    monkeypatch.setattr(gpu_check, "PARTS", {"share": measured})
    monkeypatch.setattr(gpu_check, "write", lambda *_: None)
    assert gpu_check.main(["--parts", "share", "--out", str(tmp_path / "found.json")]) == code
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
