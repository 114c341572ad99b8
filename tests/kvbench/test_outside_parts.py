"""A scorer, an allocator, a store and a benchmark from a folder that is not ours go through every command as they are.

What these commands need to know of a part the part says itself: no file of kvbench names one of `outside_parts`.
"""

import json
import shutil
import sys
from pathlib import Path

import pandas as pd
import pytest

from kvbench import cli, make_policy, memory, sweep
from kvbench.results import __main__ as results
from kvbench.tasks import trust
from kvbench.tools import diagnose

BUDGET = 24
EXTRA = 4
HEADS, DIM = 2, 8  # of the tiny model: KV heads and head dimension
OUTSIDE = Path(__file__).parents[1] / "support" / "outside"


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The folder of --config-dir, beside a module; both far from the repository and from the working folder."""
    folder = tmp_path / "own"
    shutil.copytree(OUTSIDE, folder)
    monkeypatch.delitem(sys.modules, "outside_parts", raising=False)
    return str(folder / "conf")


def test_the_parts_run_and_their_results_become_tables(conf: str, tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "runs"
    asked = ["policy=mine", "task=recall", f"model={tiny_model}", f"budget={BUDGET}", "limit=2", "device=cpu"]
    assert cli.main(["--config-dir", conf, *asked, "policy.scorer.recent=3", f"out={out}"]) == 0
    (file,) = out.glob("*/samples.jsonl")
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    assert [sample["kept_tokens"] for sample in samples] == [[[BUDGET + EXTRA] * 2, [BUDGET - EXTRA] * 2]] * 2

    assert results.main(["collect", str(out), "-o", str(tmp_path / "table.csv")]) == 0
    (row,) = pd.read_csv(tmp_path / "table.csv").to_dict("records")
    assert row["task"] == "recall"
    assert row["kept_tokens"] == BUDGET
    assert set(json.loads(row["official"])) == {"found", "answered"}
    fields = json.loads(row["policy_fields"])
    assert [fields[part]["class"] for part in ("scorer", "allocator", "store")] == [
        "outside_parts.ValueNorm",
        "outside_parts.FirstMore",
        "outside_parts.Half",
    ]
    assert fields["scorer"]["recent"] == 3


def test_no_module_is_loaded_from_a_folder_of_results(
    conf: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths, out = [*sys.path], Path(conf).parent / "runs"
    monkeypatch.chdir(Path(conf).parent)  # the results of others, with modules that their classes name
    asked = ["policy=mine", "task=recall", f"model={tiny_model}", f"budget={BUDGET}", "limit=1", "device=cpu"]
    assert cli.main(["--config-dir", "conf", *asked, f"out={out}"]) == 0
    monkeypatch.setattr(sys, "path", paths)
    monkeypatch.setattr(trust, "_trusted", set())
    monkeypatch.delitem(sys.modules, "outside_parts")
    for words in (["results", "check", "runs"], ["results", "check", "runs", "--trust", "outside_parts"]):
        assert cli.main(words) != 0
    assert cli.main(["results", "collect", "runs"]) == cli.main(["report", "runs", "-o", f"{tmp_path}/a.html"]) == 0
    assert "outside_parts" not in sys.modules
    said = capsys.readouterr().err
    assert "--trust outside_parts loads it" in said
    assert "outside_parts cannot be imported: No module named 'outside_parts'; its folder must be on PYTHONPATH" in said


def test_memory_knows_the_bytes_of_the_store(conf: str, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [f"model={tiny_model}", "policy=mine", f"budget={BUDGET}", "length=100", "decode=grow"]
    assert memory.main(["--config-dir", conf, *asked]) == 0
    tokens = (BUDGET + EXTRA) + (BUDGET - EXTRA)  # of a KV head, over both layers
    assert f" {tokens * HEADS * (2 * DIM * 2 + 4)} " in capsys.readouterr().out  # float16, and an int32 position


def test_diagnostics_measure_the_policy_on_the_task(conf: str, tiny_model: Path, tmp_path: Path) -> None:
    asked = ["--config-dir", conf, "task=recall", f"model={tiny_model}", "device=cpu", f"out={tmp_path}"]
    assert diagnose.main(["output_error", *asked, "policy=half"]) == 0
    lost = pd.read_csv(tmp_path / "diagnostics" / "output_error.csv")
    assert set(lost["policy"]) == {"half"}
    error = lost["local"] ** 0.5  # the column holds squared relative errors
    assert error.between(2**-15, 2**-11).all()  # float16 rounds to 11 binary digits


def test_predictions_are_scored_by_the_benchmark(conf: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(conf).parent)  # where the module is found
    source, output = tmp_path / "predictions.jsonl", tmp_path / "scored.jsonl"
    source.write_text('{"prediction": "It was Word7.", "word": "word7"}\n{"prediction": "", "word": "word7"}\n')
    assert cli.main(["score", "outside_parts", str(source), "-o", str(output)]) == 0
    assert [json.loads(line)["score"] for line in output.read_text().splitlines()] == [0.0, 0.0]
    assert cli.main(["score", "outside_parts", str(source), "-o", str(output), "--ignore-case"]) == 0
    assert [json.loads(line)["score"] for line in output.read_text().splitlines()] == [1.0, 0.0]


def test_a_wrapper_and_a_store_are_parts_of_names(conf: str) -> None:
    plain = make_policy("mine", 64, config_dir=conf)
    assert make_policy("mine_by_3", 64, config_dir=conf).scorer == type(plain.scorer)(recent=3)
    wrapped = make_policy("loud_mine_by_3_half_w8_s0.25_at0-2", 64, config_dir=conf)
    assert type(wrapped.value).__name__ == "Loud"
    assert (wrapped.store.width, wrapped.store.share, wrapped.store.places) == (8, 0.25, [0, 2])
    assert wrapped.schedule.decode == "evict", "a store changes no schedule"
    assert type(make_policy("loud_tova", 64, config_dir=conf).value).__name__ == "Loud"
    assert type(make_policy("caote_mine", 64, config_dir=conf).value).__name__ == "Caote"
    assert make_policy("tova_half", 64, config_dir=conf).store.width == 4
    with pytest.raises(ValueError, match=r"half has no setting x3 \(allowed: w... \(width\), s"):
        make_policy("half_x3", config_dir=conf)


def test_a_sweep_is_resumed_from_another_folder_with_parts_that_lie_beside_its_configurations(
    conf: str, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other = tmp_path / "first", tmp_path / "other"
    first.mkdir()
    other.mkdir()
    paths = [*sys.path]
    monkeypatch.chdir(first)
    asked = ["policy=mine", "task=recall", f"model={tiny_model}", f"budget={BUDGET}", "limit=1", "device=cpu"]
    assert cli.main(["-m", "--config-dir", conf, *asked, "out=runs"]) == 0
    (metrics,) = first.glob("runs/*/metrics.json")
    metrics.unlink()
    monkeypatch.delitem(sys.modules, "outside_parts")
    monkeypatch.setattr(sys, "path", paths)
    monkeypatch.chdir(other)
    assert sweep.main(["resume", "../first/runs"]) == 0
    assert metrics.exists()
