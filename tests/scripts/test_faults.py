"""The script that breaks sweeps finds what a broken sweep would leave."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def parts() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fault_sweep", SCRIPTS / "fault_sweep.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def write(out: Path, scores: list[float], seconds: float, cell: str = "one") -> Path:
    folder = out / cell
    folder.mkdir(parents=True)
    lines = [json.dumps({"index": i, "score": score, "decode_seconds": seconds}) for i, score in enumerate(scores)]
    (folder / "samples.jsonl").write_text("".join(line + "\n" for line in lines))
    (folder / "metrics.json").write_text(json.dumps({"score": sum(scores), "decode_ms_per_token": seconds}))
    (folder / "config.yaml").write_text(f"out: {out}\n")
    return out


def test_only_seconds_may_differ(parts: ModuleType, tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", [1.0, 0.0], seconds=1.0)
    assert parts.compare(whole, write(tmp_path / "same", [1.0, 0.0], seconds=2.0)) == []
    assert parts.compare(whole, write(tmp_path / "other", [1.0, 1.0], seconds=1.0)) == [
        "one/metrics.json differs",
        "one/samples.jsonl differs",
    ]


def test_processes_are_found_by_their_environment_and_can_be_killed(parts: ModuleType, tmp_path: Path) -> None:
    sweep = parts.Sweep(tmp_path / "out")
    client = sweep.start(before="import time; time.sleep(60)")
    try:
        while sweep.processes() != [client.pid]:
            assert client.poll() is None
        assert parts.Sweep(tmp_path / "other").processes() == []
    finally:
        sweep.kill_all()
    assert client.wait() == -9


@pytest.mark.slow("starts processes")
def test_a_sweep_survives_kills_and_damaged_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import runpy

    monkeypatch.syspath_prepend(str(SCRIPTS))  # as `python scripts/NAME` has it
    monkeypatch.setattr(sys, "argv", ["faults.py", "kills", "line", "--kills", "5", "--folder", str(tmp_path)])
    with pytest.raises(SystemExit) as done:
        runpy.run_path(str(SCRIPTS / "faults.py"), run_name="__main__")
    assert done.value.code == 0
