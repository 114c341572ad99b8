"""Locks: one process computes a run, and a process that was killed leaves the run free."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvbench.results.files import RunBusyError, RunLostError, held, is_held
from kvbench.results.samples import FILE_NAME, Sample, open_samples, read_samples


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
