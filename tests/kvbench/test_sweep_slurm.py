"""Sweeps on a real SLURM of one node: what clients, jobs, nodes and people do to them loses no finished example."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from shown_tables import shown_rows

pytestmark = pytest.mark.slow("waits for SLURM")
ROOT = Path(__file__).parents[2]
SECONDS = {"prefill_seconds", "decode_seconds"}
LONG = ("task.lengths=[1000]", "task.depths=[0.5]", "task.repeats=400", "task.max_new_tokens=8", "engine.rows=1")
SHORT = ("task.lengths=[300]", "task.depths=[0.5]", "task.repeats=3", "task.max_new_tokens=3")
ON_CPUS = (
    "launcher=slurm",
    "launcher.gpus_per_node=0",
    "launcher.cpus_per_task=1",
    "launcher.mem_gb=2",
    "launcher.timeout_min=20",
)


@pytest.fixture(scope="module")
def slurm() -> Iterator[None]:
    """SLURM as scripts/slurm_local.sh brings it up, for all commands of these tests."""
    script = ROOT / "scripts" / "slurm_local.sh"
    started = subprocess.run([script, "start"], capture_output=True, text=True, check=False)
    if started.returncode == 3:
        pytest.skip(started.stderr.strip())
    assert started.returncode == 0, started.stderr
    name, _, value = started.stdout.strip().removeprefix("export ").partition("=")
    os.environ[name] = value
    os.environ["OMP_NUM_THREADS"] = "1"
    yield
    del os.environ[name]
    subprocess.run([script, "stop"], check=True)


@pytest.fixture
def sweep(slurm: None, tmp_path: Path, tiny_model: Path) -> Iterator["Sweep"]:
    started = Sweep(tmp_path, tiny_model)
    yield started
    subprocess.run(["scancel", "--user=root"], check=False)


class Sweep:
    """A sweep of three policies into `runs`, and the commands that follow it."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.out = folder / "runs"
        self.model = model

    def command(self, *arguments: str) -> list[str]:
        cells = (f"model={self.model}", "policy=tova,knorm,full", "budget=40", "out=runs")
        return [sys.executable, "-m", "kvbench", "-m", *cells, *ON_CPUS, *arguments]

    def submit(self, *arguments: str, code: int = 0) -> str:
        """Submit, and return the number of the array."""
        done = subprocess.run(self.command(*arguments), cwd=self.folder, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        (array,) = re.findall(r"^submitted: array (\d+),", done.stdout, re.MULTILINE)
        assert f"python -m kvbench.sweep status {self.out.relative_to(self.folder)}" in done.stdout
        return array

    def ask(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kvbench.sweep", arguments[0], "runs", *arguments[1:]]
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False)

    def states(self) -> dict[str, str]:
        """What `status` says of each policy."""
        return dict(re.findall(r"^ policy=(\S+) +(\w+)", self.ask("status").stdout, re.MULTILINE))

    def samples(self) -> dict[str, list[dict[str, Any]]]:
        """The samples of every cell by its policy, without seconds."""
        found = {}
        for path in self.out.glob("*/samples.jsonl"):
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            policy = path.parent.name.removeprefix(f"{self.model.name}-").partition("-")[0]
            found[policy] = [{k: v for k, v in line.items() if k not in SECONDS} for line in lines]
        return found

    def kept(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in self.out.glob("*/samples.jsonl")}

    def begun(self) -> Path:
        """Wait until a cell, or a shard, has some examples and an owner; the lock of that one."""
        found: list[Path] = []

        def some() -> bool:
            for lock in self.out.rglob(".lock"):
                lines = [*lock.parent.glob("s*.jsonl")]
                if lines and lines[0].read_bytes().count(b"\n") > 2 and lock.exists():
                    found.append(lock)
            return bool(found)

        until(some)
        return found[0]


def until(what: Callable[[], object]) -> None:
    """Wait for a state; the limit is for what would never come, not for a machine that is slow."""
    deadline = time.monotonic() + 900
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def job_state(task: str) -> str:
    """What SLURM itself says of a task that has ended."""
    done = subprocess.run(
        ["sacct", "-n", "-P", "-X", "-j", task, "-o", "State,ExitCode"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def running_jobs(array: str) -> list[str]:
    ask = ["squeue", "-h", "-r", "-j", array, "-t", "R", "-o", "%F_%K"]
    return subprocess.run(ask, capture_output=True, text=True, check=False).stdout.split()


def test_a_sweep_is_submitted_once_and_a_bad_cell_fails_alone(sweep: Sweep) -> None:
    bad = ("policy=tova,knorm,snapkv", "budget=16,40", *SHORT)
    array = sweep.submit(*bad, "launcher.jobs=2", code=2)  # snapkv cannot do with 16
    name = subprocess.run(["squeue", "-h", "-j", array, "-o", "%j"], capture_output=True, text=True).stdout.split()
    assert set(name) <= {"kvbench-runs"}
    waited = sweep.ask("wait")
    assert waited.returncode == 2
    assert "1 of 6 cells failed" in waited.stderr
    assert len(shown_rows(waited.stdout)) == 5
    until(lambda: job_state(f"{array}_0") == job_state(f"{array}_1") == "COMPLETED|0:0")
    again = subprocess.run(sweep.command(*bad), cwd=sweep.folder, capture_output=True, text=True, check=False)
    assert "nothing to submit: 5 of 6 cells are finished, 0 are queued or running" in again.stderr
    assert "5 finished, 1 failed; 15 of 15 examples" in sweep.ask("status").stdout


def test_a_killed_job_is_failed_for_slurm_and_resume_continues_it(sweep: Sweep) -> None:
    sweep.submit(*LONG, "limit=60", "launcher.jobs=3")
    lock = sweep.begun()
    killed = lock.parent.name.removeprefix(f"{sweep.model.name}-").partition("-")[0]
    owner = json.loads(lock.read_bytes())
    os.kill(owner["pid"], signal.SIGKILL)
    assert sweep.ask("wait").returncode == 1
    states = sweep.states()
    assert states.pop(killed) == "failed"
    assert set(states.values()) == {"finished"}
    until(lambda: job_state(owner["job"]).startswith("FAILED|"))
    assert f"job {owner['job']} ended as FAILED, exit code 0:9 (log: " in sweep.ask("status").stdout
    before = sweep.kept()
    assert sweep.ask("resume").returncode == 0
    assert sweep.ask("wait").returncode == 0
    assert all(path.read_bytes().startswith(content) for path, content in before.items())
    assert {policy: len(lines) for policy, lines in sweep.samples().items()} == {"tova": 60, "knorm": 60, "full": 60}


def test_cancel_ends_jobs_and_keeps_examples(sweep: Sweep) -> None:
    array = sweep.submit(*LONG, "launcher.jobs=3", "launcher.array_parallelism=1")
    sweep.begun()
    assert "3 jobs, 0 processes" in sweep.ask("cancel").stdout
    until(lambda: not running_jobs(array))
    until(lambda: not list(sweep.out.glob("*/.lock")))
    until(lambda: set(sweep.states().values()) == {"failed"})
    assert "ended as CANCELLED" in sweep.ask("status").stdout
    assert not running_jobs(array), "a cancelled job did not come back"


def test_a_preempted_job_goes_back_to_the_queue_and_continues(sweep: Sweep) -> None:
    array = sweep.submit(*LONG, "limit=80", "launcher.jobs=1")
    sweep.begun()
    held = sweep.folder / "held"
    held.touch()
    other = ["sbatch", "--partition=high", "--exclusive", "--output=/dev/null"]
    subprocess.run([*other, f"--wrap=while [ -e {held} ]; do sleep 0.2; done"], check=True)
    until(lambda: not running_jobs(array))
    until(lambda: set(sweep.states().values()) <= {"queued", "finished"})
    before = sweep.kept()
    held.unlink()
    assert sweep.ask("wait").returncode == 0
    assert all(path.read_bytes().startswith(content) for path, content in before.items())
    assert {len(lines) for lines in sweep.samples().values()} == {80}


def test_a_job_at_its_time_limit_continues_in_the_queue(sweep: Sweep) -> None:
    sweep.submit(*LONG, "policy=tova", "task.max_new_tokens=400", "launcher.timeout_min=2")
    until(lambda: "goes back to the queue" in "".join(p.read_text() for p in sweep.out.glob(".sweep/logs/*")))
    assert set(sweep.states().values()) <= {"queued", "running"}
    assert sweep.ask("cancel").returncode == 0


def test_shards_of_a_cell_are_tasks_of_the_array_and_one_that_is_killed_is_continued(sweep: Sweep) -> None:
    array = sweep.submit(*LONG, "limit=60", "policy=tova", "launcher.shards=2")
    lock = sweep.begun()
    assert lock.parent.name in ("shard-1of2", "shard-2of2")
    os.kill(json.loads(lock.read_bytes())["pid"], signal.SIGKILL)
    assert sweep.ask("wait").returncode == 1
    states = sorted(job_state(f"{array}_{number}").partition("|")[0] for number in (0, 1))
    assert states == ["COMPLETED", "FAILED"]
    lines = [line for path in sweep.out.rglob("shard.jsonl") for line in path.read_bytes().splitlines(keepends=True)]
    before = {line for line in lines if line.endswith(b"\n")}
    assert 30 < len(before) < 60
    assert sweep.ask("status").stdout.splitlines()[-1] == f"1 cell: 1 failed; {len(before)} of 60 examples"
    assert sweep.ask("resume").returncode == 0
    assert sweep.ask("wait").returncode == 0
    (run,) = sweep.out.glob("*/samples.jsonl")
    assert before <= set(run.read_bytes().splitlines(keepends=True)), "seconds and all"
    split = sweep.samples()["tova"]
    assert [line["index"] for line in split] == list(range(60))
    assert not list(run.parent.glob("shard-*"))
    cell = (f"model={sweep.model}", "policy=tova", "budget=40", "out=whole", "limit=60", *LONG)
    subprocess.run([sys.executable, "-m", "kvbench", *cell], cwd=sweep.folder, check=True)
    sweep.out = sweep.folder / "whole"
    assert sweep.samples()["tova"] == split


def test_without_a_gpu_that_was_asked_for_a_job_fails_in_one_sentence(sweep: Sweep) -> None:
    from kvbench.records.definition import entries_of, read_definition
    from kvbench.sweeps.shares import pieces, read_share, write_share

    sweep.submit(*LONG, "limit=1", "launcher.sbatch=['--hold']")
    (share,) = (path.stem for path in sweep.out.glob(".sweep/shares/*.json"))
    keys = [key for key, _ in read_share(sweep.out, share)[0]]
    asked = pieces(entries_of(read_definition(sweep.out), keys), 1)
    write_share(sweep.out, share, asked, gpus=1)  # this node has none to ask for
    subprocess.run(["scancel", "--user=root"], check=True)
    command = [sys.executable, "-m", "kvbench.sweep", "work", "runs", "--share", share]
    done = subprocess.run(command, cwd=sweep.folder, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "launcher.gpus_per_node=1 was asked for, but" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_lone_cell_is_submitted_too(sweep: Sweep) -> None:
    cell = (f"model={sweep.model}", "policy=tova", "budget=40", "out=runs", "launcher.wait=true")
    command = [sys.executable, "-m", "kvbench", *cell, *ON_CPUS, *SHORT]
    done = subprocess.run(command, cwd=sweep.folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "submitted: array" in done.stdout
    assert len(shown_rows(done.stdout)) == 1


def test_what_slurm_refuses_is_one_sentence(sweep: Sweep) -> None:
    command = sweep.command(*SHORT, "launcher.partition=nowhere")
    done = subprocess.run(command, cwd=sweep.folder, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("kvbench: sbatch refused the jobs: ")
    assert done.stderr.count("\n") == 1
