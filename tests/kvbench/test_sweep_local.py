"""Sweeps on this machine: in one process or several, interrupted, and beside each other."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from shown_tables import shown_rows

from kvbench.cli import main
from kvbench.records.samples import open_samples

HOW = {"prefill_seconds", "decode_seconds", "shared_prefill", "rows_in_flight"}
SMALL = ("task.lengths=[300]", "task.depths=[0.5]", "task.repeats=3", "task.max_new_tokens=3")


def start(*arguments: object, cwd: Path, module: str = "kvbench") -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)], env=environment, text=True, cwd=cwd, **pipes
    )


def samples(out: Path) -> dict[str, list[dict[str, Any]]]:
    """The samples of every run in `out`, but for how each was computed."""
    return {
        path.parent.name: [
            {k: v for k, v in json.loads(line).items() if k not in HOW} for line in path.read_text().splitlines()
        ]
        for path in out.glob("*/samples.jsonl")
    }


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_definition_names_every_cell_once_in_the_order_of_the_sweep(
    here: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = ("-m", f"model={tiny_model}", "policy=tova,full,snapkv", "budget=16,40", "limit=1", "out=runs", *SMALL)
    assert main(list(sweep)) == 2  # snapkv cannot do with 16
    definition = yaml.safe_load((here / "runs" / "sweep.yaml").read_text())
    titles = [cell["title"] for cell in definition["cells"]]
    assert titles == [
        "policy=tova budget=16",
        "policy=tova budget=40",
        "policy=full budget=16",
        "policy=snapkv budget=16",
        "policy=snapkv budget=40",
    ]
    wrong = definition["cells"][3]
    assert (wrong["run_id"], wrong["code"]) == (None, 2)
    assert "too small for snapkv" in wrong["error"]
    assert {cell["run_id"] for cell in definition["cells"]} - {None} == set(samples(here / "runs"))
    assert capsys.readouterr().out.splitlines()[-1] == "results: runs"
    assert definition["name"] == "runs"
    assert definition["versions"]["packages"]["torch"]
    assert main(["-m", f"model={tiny_model}", "policy=knorm", "budget=40", "limit=1", "out=runs", *SMALL]) == 0
    more = yaml.safe_load((here / "runs" / "sweep.yaml").read_text())
    assert [cell["title"] for cell in more["cells"]][:5] == titles
    assert len(more["cells"]) == 6
    assert len(more["commands"]) == 2


def test_cells_that_another_process_computes_are_waited_for(
    here: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = "engine.rows=1"  # a sample says with how many others it was computed
    sweep = ["-m", f"model={tiny_model}", "policy=tova,knorm", "budget=40", "limit=1", "out=runs", alone, *SMALL]
    assert main(sweep) == 0
    whole = samples(here / "runs")
    (mine,) = here.glob("runs/*tova*/samples.jsonl")
    mine.write_text("")
    held = open_samples(mine)
    held.__enter__()
    ended = SimpleNamespace(sleep=lambda _: held.__exit__(None, None, None))
    monkeypatch.setattr("kvbench.sweeps.compute.time", ended)
    capsys.readouterr()
    assert main(sweep) == 0
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert f"1 cell is being computed by process {os.getpid()} on " in said.err
    assert "waiting for it" in said.err
    assert len(shown_rows(said.out)) == 2
    assert samples(here / "runs") == whole


@pytest.mark.slow("starts processes")
@pytest.mark.parametrize("workers", [1, 2])
def test_sigterm_ends_a_sweep_as_ctrl_c_does(here: Path, tiny_model: Path, workers: int) -> None:
    long = ("task.lengths=[1000]", "task.repeats=200", "task.depths=[0.5]")
    sweep = ("-m", f"model={tiny_model}", "policy=tova,knorm", "budget=40", "out=runs", *long)
    started = start(*sweep, f"launcher.workers={workers}", cwd=here)
    deadline = time.monotonic() + 100
    while not any(len(run) >= 3 for run in samples(here / "runs").values()):
        assert started.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    started.send_signal(signal.SIGTERM)
    _, err = started.communicate(timeout=60)
    assert started.returncode == 143
    assert err.splitlines()[-1] == "kvbench: interrupted; finished examples are kept, the same command continues"
    assert "Traceback" not in err
    assert not list(here.glob("runs/*/.lock"))  # every process gave its runs free


@pytest.mark.slow("starts processes")
def test_workers_end_with_a_client_that_was_killed(here: Path, tiny_model: Path) -> None:
    long = ("task.lengths=[1000]", "task.repeats=500", "task.depths=[0.5]")
    sweep = ("-m", f"model={tiny_model}", "policy=tova,knorm", "budget=40", "out=runs", "launcher.workers=2", *long)
    started = start(*sweep, cwd=here)
    deadline = time.monotonic() + 100
    while not any(len(run) >= 3 for run in samples(here / "runs").values()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    started.kill()
    started.communicate()
    while list(here.glob("runs/*/.lock")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
