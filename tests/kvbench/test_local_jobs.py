"""Jobs of this machine: what lives is known by a lock, and what is told to stop, or loses its client, ends."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_cells import until

from kvbench.errors import UsageError
from kvbench.results.files import is_held
from kvbench.sweep import main as sweep
from kvbench.sweeps.jobs import Launcher
from kvbench.sweeps.worker import Job, jobs_folder, submitted

TWO = ("policy=full,tova", "budget=40", "task.lengths=[340]", "task.max_new_tokens=8", "engine.rows=1")
LOCAL = ("hydra/launcher=slurm", "hydra.launcher.cluster=local", "hydra.launcher.gpus_per_node=0")
MANY = "task.repeats=300"


def start(folder: Path, model: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kvbench", "-m", f"model={model}", *TWO, *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=pipe, text=True)


def written(out: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in out.glob("*/samples.jsonl"))


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def test_a_job_is_not_a_process_that_has_its_old_id(
    tmp_path: Path, bystander: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = jobs_folder(tmp_path)
    folder.mkdir(parents=True)
    Job(folder, str(bystander.pid), "local", ("a",)).write()
    (folder / f"{bystander.pid}.lock").touch()
    (job,) = submitted(tmp_path).values()
    assert not job.active
    (tmp_path / "sweep.yaml").write_text("name: x\ncommands: []\nlauncher: {}\nversions: {}\nruns: []\n")
    assert sweep(["cancel", str(tmp_path)]) == 0
    assert "cancelled 0 jobs" in capsys.readouterr().out
    assert bystander.poll() is None


@pytest.mark.parametrize("record", ["{", "[]", '{"cluster": "local"}', '{"cluster": "x", "keys": []}', "[" * 10**5])
def test_a_damaged_record_is_ignored(record: str, tmp_path: Path) -> None:
    folder = jobs_folder(tmp_path)
    folder.mkdir(parents=True)
    (folder / "1.json").write_text(record)
    assert submitted(tmp_path) == {}


def test_a_time_limit_without_time_to_work_is_refused() -> None:
    with pytest.raises(UsageError, match=r"timeout_min=2 leaves no time to work.*3 is the smallest that works"):
        Launcher(cluster="slurm", timeout_min=2)
    Launcher(cluster="slurm", timeout_min=3)
    Launcher(cluster="local", timeout_min=1)


@pytest.mark.slow("starts processes")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_their_client(number: int, tmp_path: Path, tiny_model: Path) -> None:
    client = start(tmp_path, tiny_model, "hydra.launcher.workers=2", MANY, "out=out")
    out = tmp_path / "out"
    until(lambda: len([*out.glob("*/samples.jsonl")]) == 2 and written(out) > 2)
    os.kill(client.pid, number)
    _, errors = client.communicate(timeout=60)
    assert client.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert "Traceback" not in errors
    until(lambda: not any(job.active for job in submitted(out).values()), 30)
    assert not any(is_held(path.parent) for path in out.glob("*/samples.jsonl"))
    kept = written(out)
    time.sleep(1)
    assert written(out) == kept


@pytest.mark.slow("starts processes")
def test_two_resumes_at_once_submit_a_run_once_and_setup_commands_are_private(tmp_path: Path, tiny_model: Path) -> None:
    setup = "hydra.launcher.setup=['export TOKEN=secret-of-mine']"
    assert start(tmp_path, tiny_model, *LOCAL, MANY, "out=out", setup).wait() == 0
    out = tmp_path / "out"
    assert sweep(["cancel", str(out)]) == 0
    before = len([*jobs_folder(out).glob("*.json")])
    command = [sys.executable, "-m", "kvbench.sweep", "resume", str(out)]
    both = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert len([*jobs_folder(out).glob("*.json")]) == before + 1
    assert sweep(["cancel", str(out)]) == 0
    holding = [path for path in tmp_path.rglob("*") if path.is_file() and b"secret-of-mine" in path.read_bytes()]
    assert {path.name for path in holding} >= {"sweep.yaml", "multirun.yaml"}
    for path in holding:  # in a file or a folder that others cannot read
        folders = [one for one in (path, *path.parents) if one.is_relative_to(out)]
        assert any(not one.stat().st_mode & 0o077 for one in folders), path


@pytest.mark.slow("meets a time limit of a minute")
def test_a_time_limit_stops_a_job_with_a_message_and_no_failed_run(tmp_path: Path, tiny_model: Path) -> None:
    limit = ("hydra.launcher.timeout_min=1", "hydra.launcher.max_num_timeout=1", "hydra.launcher.wait=true")
    long = ("task.lengths=[700]", "task.max_new_tokens=128", "task.repeats=500")
    client = start(tmp_path, tiny_model, *LOCAL, *limit, *long, "out=out")
    client.communicate()
    out = tmp_path / "out"
    (log,) = jobs_folder(out).glob("*.log")
    text = log.read_text()
    assert "the job met its time limit; examples on disk are kept" in text
    assert f"kvbench sweep resume {out}" in text
    assert "Traceback" not in text
    assert written(out) > 0
    states = [json.loads(path.read_text()) for path in out.glob(".sweep/cells/*.json")]
    assert [state["error"] for state in states] == [None] * len(states)


@pytest.mark.slow("starts processes")
def test_a_command_from_another_folder_leaves_the_paths_of_earlier_runs(tmp_path: Path, tiny_model: Path) -> None:
    names = ("a", "b")
    for name in names:
        folder = tmp_path / name
        folder.mkdir()
        text = json.dumps({"context": f"The code of {name} is 12{name}. " * 30, "question": "code?", "answer": name})
        (folder / "mine.jsonl").write_text(text + "\n")
    own = ("task=context_question", "task.data_dir=mine.jsonl", f"out={tmp_path / 'out'}", "task.max_new_tokens=4")
    stopped = ("hydra.launcher.cluster=local", "hydra.launcher.gpus_per_node=0", "hydra.launcher.max_num_timeout=0")
    for name in names:
        command = [sys.executable, "-m", "kvbench", "-m", f"model={tiny_model}", "policy=full", "budget=40"]
        words = ["hydra/launcher=slurm", *stopped, "hydra.launcher.wait=true", *own]
        done = subprocess.run([*command, *words], cwd=tmp_path / name, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    runs = sorted((tmp_path / "out").glob("*/samples.jsonl"))
    assert len(runs) == 2
    for path in runs:
        path.unlink()
    assert sweep(["resume", str(tmp_path / "out")]) == 0
    references = {json.loads(path.read_text())["references"][0] for path in runs}
    assert references == {"a", "b"}
