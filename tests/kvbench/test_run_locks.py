"""Locks: one process computes a run, and a process that was killed leaves the run free."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from plotted_runs import answered, failed, write_run

from kvbench.engine import compute
from kvbench.results import definition
from kvbench.results.files import RunBusyError, RunLostError, held, is_held
from kvbench.results.samples import FILE_NAME, Sample, open_samples, read_samples
from kvbench.sweeps.worker import Job, jobs_folder, submitted


def sample(index: int, error: str | None = None) -> Sample:
    return Sample(
        index, "ab" * 32, 100, ["a"], output=None if error else "a", score=None if error else 1.0, error=error
    )


def test_a_stopped_process_keeps_its_run_and_a_killed_one_leaves_it_free(tmp_path: Path) -> None:
    program = (
        "import sys; from kvbench.results.files import *\nwith held(Path(sys.argv[1])): print(flush=True), input()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], **pipes) as other:
        other.stdout.readline()
        os.kill(other.pid, signal.SIGSTOP)
        try:
            assert is_held(tmp_path)
            with pytest.raises(RunBusyError, match="another process is computing this run"), held(tmp_path):
                pass
        finally:
            other.kill()
    assert not is_held(tmp_path)
    with held(tmp_path):
        assert is_held(tmp_path)
    assert not list(tmp_path.iterdir())


def test_asking_for_a_lock_keeps_nobody_from_taking_it(tmp_path: Path) -> None:
    program = (
        "import sys; from kvbench.results.files import *\nprint(flush=True)\nwhile True: is_held(Path(sys.argv[1]))"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        try:
            for _ in range(1000):
                with held(tmp_path):
                    pass
        finally:
            other.kill()


def test_runs_are_open_in_groups_that_the_limit_of_open_files_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    used = len(os.listdir("/dev/fd"))
    for allowed, expected in ((1024, 200), (256, (256 - used - 56) // 2), (64, 1), (resource.RLIM_INFINITY, 200)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, allowed=allowed: (allowed, allowed))
        assert compute._open_runs() == pytest.approx(expected, abs=1)


def test_a_later_submission_is_the_newer_job_whatever_the_clock_says(tmp_path: Path) -> None:
    folder = jobs_folder(tmp_path)
    folder.mkdir(parents=True)
    for number, (name, time) in enumerate((("first", 2_000_000_000), ("second", 1_000_000_000), ("third", 0)), 1):
        Job(folder, name, "local", ("a", *["b"] * (number < 3)), submission=number).write()
        os.utime(folder / f"{name}.json", (time, time))
    assert {key: job.id for key, job in submitted(tmp_path).items()} == {"a": "third", "b": "second"}


def test_the_progress_of_a_finished_run_is_known_without_reading_its_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [answered(i, 1.0) for i in range(5)]
    folder = write_run(tmp_path, "tova", [*samples, failed(answered(5, 1.0))])
    monkeypatch.setattr(definition, "read_samples", None)
    assert definition.examples(folder) == (6, 1)
    monkeypatch.undo()
    later = (folder / "metrics.json").stat().st_mtime_ns + 10**9
    os.utime(folder / "samples.jsonl", ns=(later, later))
    assert definition.examples(folder) == (6, 1)


def test_a_run_whose_file_was_replaced_or_changed_stops_before_its_next_line(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    with open_samples(path) as file:
        file.append(sample(0))
        written = path.read_bytes()
        path.write_bytes(written * 2)
        with pytest.raises(RunLostError, match="was changed while its run was computed"):
            file.append(sample(1))
        path.unlink()
        path.write_bytes(written)
        with pytest.raises(RunLostError, match="was deleted or replaced"):
            file.append(sample(1))
    assert path.read_bytes() == written


def test_a_failed_example_is_replaced_in_its_line(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    with open_samples(path) as file:
        for index in range(3):
            file.append(sample(index, "OutOfMemoryError" if index == 1 else None))
        before = path.read_bytes().splitlines()
        file.replace(sample(1))
        file.append(sample(3))
    after = path.read_bytes().splitlines()
    assert (after[0], after[2]) == (before[0], before[2])
    assert [(one.index, one.score) for one in read_samples(path)] == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 1.0)]
