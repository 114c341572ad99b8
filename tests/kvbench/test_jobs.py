"""Sweeps in jobs: on this machine and on SLURM, killed, preempted and resumed, no example is lost or computed twice."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_cells import samples, until

from kvbench.results.definition import Entry
from kvbench.sweep import main as sweep
from kvbench.sweeps.jobs import grouped, submitted

ROOT = Path(__file__).resolve().parents[2]
SIX = ("policy=full,tova,streamingllm", "budget=24,40", "task.lengths=[340]", "task.max_new_tokens=4", "engine.rows=1")
SIX_RUNS = 5  # full ignores the budget


def start(folder: Path, model: Path, *words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "kvbench", "-m", f"model={model}", *SIX, *words]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def test_runs_that_share_prefills_are_in_one_job() -> None:
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


@pytest.mark.slow("starts processes")
def test_cancel_stops_the_jobs_and_keeps_finished_examples(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    local = ("hydra/launcher=slurm", "hydra.launcher.cluster=local", "hydra.launcher.gpus_per_node=0")
    assert start(tmp_path, tiny_model, *local, "task.repeats=5", "out=jobs").wait() == 0
    out = tmp_path / "jobs"
    until(lambda: any(samples(out).values()))
    assert sweep(["cancel", str(out)]) == 0
    assert "cancelled 1 jobs" in capsys.readouterr().out
    until(lambda: not any(job.active for job in submitted(out).values()))
    kept = samples(out)
    assert 0 < sum(map(len, kept.values())) < SIX_RUNS * 50
    assert sweep(["resume", str(out), "hydra.launcher.wait=true"]) == 0
    whole = samples(out)
    assert [len(rows) for rows in whole.values()] == [50] * SIX_RUNS
    assert all(whole[name][: len(rows)] == rows for name, rows in kept.items())


@pytest.mark.slow("kills processes")
def test_twenty_kills_of_a_sweep_lose_and_repeat_nothing(tmp_path: Path, tiny_model: Path) -> None:
    assert start(tmp_path, tiny_model, "out=whole").wait() == 0
    chance, seen = random.Random(0), b""
    for _ in range(20):
        process = start(tmp_path, tiny_model, "out=killed")
        before = sum(path.stat().st_size for path in tmp_path.glob("killed/*/samples.jsonl"))
        until(lambda process=process, before=before: process.poll() is not None or _size(tmp_path) > before)
        time.sleep(chance.uniform(0, 0.3))
        process.kill()
        process.wait()
        now = b"".join(path.read_bytes() for path in sorted(tmp_path.glob("killed/*/samples.jsonl")))
        assert len(now) >= len(seen)
        seen = now
    assert start(tmp_path, tiny_model, "out=killed").wait() == 0
    assert samples(tmp_path / "killed") == samples(tmp_path / "whole")


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("killed/*/samples.jsonl"))


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
    until(lambda: any(samples(out).values()))
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
