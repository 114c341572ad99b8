"""Sweeps in jobs: on this machine and on SLURM, killed, preempted and resumed, no example is lost or computed twice."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvbench.results.definition import Entry
from kvbench.sweep import main as sweep
from kvbench.sweeps.jobs import grouped

ROOT = Path(__file__).resolve().parents[2]
SIX = ("policy=full,tova,streamingllm", "budget=24,40", "task.lengths=[340]", "task.max_new_tokens=4", "engine.rows=1")
SIX_RUNS = 5  # full ignores the budget


def start(folder: Path, model: Path, *words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "kvbench", "-m", f"model={model}", *SIX, *words]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def samples(out: Path) -> dict[str, list[dict[str, object]]]:
    """The samples of all runs without what differs from one computation to the next."""
    found = {}
    for path in sorted(out.glob("*/samples.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        own = ("seconds", "rows_in_flight", "shared_prefill")
        found[path.parent.name] = [{k: v for k, v in row.items() if not any(o in k for o in own)} for row in rows]
    return found


def until(condition: Callable[[], object], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)


def test_runs_are_dealt_to_jobs_by_what_they_share() -> None:
    def entry(name: str, task: str) -> Entry:
        return Entry(name, "m", name, task, None, {}, run_id=name, identity={"task": task})

    entries = [entry(name, task) for name, task in (("a", "x"), ("b", "y"), ("c", "x"), ("d", "y"))]
    assert [[one.key for one in group] for group in grouped(entries, None)] == [["a", "c"], ["b", "d"]]
    assert [[one.key for one in group] for group in grouped(entries, 3)] == [["a"], ["c", "b"], ["d"]]
    assert len(grouped(entries, 9)) == 4


@pytest.mark.slow("starts processes")
def test_jobs_of_this_machine_are_followed_waited_for_and_resumed(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(tmp_path, tiny_model, "out=here").wait() == 0
    local = ("hydra/launcher=slurm", "hydra.launcher.cluster=local", "hydra.launcher.jobs=2")
    assert start(tmp_path, tiny_model, *local, "hydra.launcher.gpus_per_node=0", "out=jobs").wait() == 0
    out = tmp_path / "jobs"
    assert sweep(["wait", str(out)]) == 0
    assert "results: " in capsys.readouterr().out
    assert samples(out) == samples(tmp_path / "here")
    lost = next(out.glob("*/samples.jsonl"))
    lines = lost.read_bytes().splitlines(keepends=True)
    lost.write_bytes(b"".join(lines[:3]))
    (lost.parent / "metrics.json").unlink()
    assert sweep(["status", str(out)]) == 0
    assert f"{SIX_RUNS} runs: {SIX_RUNS - 1} finished, 1 failed" in capsys.readouterr().out
    assert sweep(["resume", str(out), "hydra.launcher.wait=true"]) == 0
    assert samples(out) == samples(tmp_path / "here")
    assert sweep(["resume", str(out)]) == 0
    assert "nothing is left to do" in capsys.readouterr().out


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    script = ROOT / "scripts" / "slurm_local.sh"
    done = subprocess.run([script, "start"], capture_output=True, text=True, check=False)
    if done.returncode == 3:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    for word in done.stdout.split():
        name, equals, value = word.partition("=")
        if equals:
            monkeypatch.setenv(name, value.strip("'\";"))
    yield
    subprocess.run([script, "stop"], check=False, capture_output=True)


@pytest.mark.slow("starts a SLURM")
def test_a_preempted_a_killed_and_a_drained_job_lose_nothing(tmp_path: Path, tiny_model: Path, slurm: None) -> None:
    long = ("task.repeats=15",)
    assert start(tmp_path, tiny_model, "out=whole", *long).wait() == 0
    fields = ("cpus_per_task=1", "mem_gb=2", "gpus_per_node=0", "jobs=3", "timeout_min=30", "partition=low")
    cluster = ("hydra/launcher=slurm", *(f"hydra.launcher.{field}" for field in fields))
    assert start(tmp_path, tiny_model, *cluster, "out=jobs", *long).wait() == 0
    out = tmp_path / "jobs"
    until(lambda: samples(out))
    preempt = ["sbatch", "--partition=high", "--exclusive", "--wrap", "sleep 2", "--output", str(tmp_path / "high.log")]
    subprocess.run(preempt, check=True, capture_output=True)
    until(lambda: (tmp_path / "high.log").exists())
    until(lambda: _pids(out), 400)  # SLURM waits for two minutes before it starts a job again
    os.kill(_pids(out)[0], signal.SIGKILL)
    node = subprocess.run(["sinfo", "-hN", "-o", "%N"], capture_output=True, text=True, check=True).stdout.split()[0]
    subprocess.run(["scontrol", "update", f"nodename={node}", "state=drain", "reason=test"], check=True)
    time.sleep(5)
    subprocess.run(["scontrol", "update", f"nodename={node}", "state=resume"], check=True)
    sweep(["wait", str(out)])
    sweep(["resume", str(out), "hydra.launcher.wait=true"])
    assert samples(out) == samples(tmp_path / "whole")


def _pids(out: Path) -> list[int]:
    """The processes that compute jobs of a sweep."""
    found = subprocess.run(["pgrep", "-f", f"submitit.core._submit {out}"], capture_output=True, text=True, check=False)
    return [int(line) for line in found.stdout.split()]
