"""Locks: one process computes a run, nobody takes it from one that lives, and one that is gone left it free."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.records import locks
from kvbench.records.locks import RunBusyError, RunLostError, holder, take
from kvbench.records.sample import Sample
from kvbench.records.samples import open_samples
from kvbench.sweeps import compute


def sample(index: int) -> Sample:
    return Sample(index=index, prompt_hash="ab" * 32, prompt_tokens=100, references=["a"], output="a", score=1.0)


def test_nobody_takes_a_run_from_a_process_that_is_only_stopped_and_one_that_was_killed_left_it_free(
    tmp_path: Path,
) -> None:
    program = (
        "import sys; from kvbench.records.locks import *; lock = take(Path(sys.argv[1])); print(flush=True); input()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], **pipes) as other:
        assert other.stdout is not None
        other.stdout.readline()
        os.kill(other.pid, signal.SIGSTOP)
        try:
            with pytest.raises(RunBusyError, match=f"belongs to process {other.pid} on "):
                take(tmp_path)
        finally:
            other.kill()
    assert (tmp_path / ".lock").exists()
    assert holder(tmp_path) is None
    lock = take(tmp_path)
    assert str(holder(tmp_path)).startswith(f"process {os.getpid()} on ")
    lock.close()
    assert not list(tmp_path.iterdir())


def test_of_many_who_find_what_a_killed_process_left_one_takes_it(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text('{"host": "far", "pid": 7}')
    won: list[locks.Lock] = []
    together = threading.Barrier(8)

    def attempt() -> None:
        together.wait()
        with suppress(RunBusyError):
            won.append(take(tmp_path))

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    won[0].check()
    won[0].close()
    assert not list(tmp_path.iterdir())


def test_a_holder_whose_lock_was_deleted_stops_before_its_next_line(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    with open_samples(path) as file:
        file.append(sample(0))
        written = path.read_bytes()
        (tmp_path / ".lock").unlink()
        other = take(tmp_path)
        with pytest.raises(RunLostError, match=r"\.lock was deleted while its run was computed"):
            file.append(sample(1))
    assert path.read_bytes() == written
    assert holder(tmp_path) is not None, "another one's lock is not given free"
    other.close()


def test_where_the_file_system_has_no_locks_this_is_said_and_who_finds_foreign_lines_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with open_samples(tmp_path / "samples.jsonl") as file:
        assert "no locks on its file system (Operation not supported)" in caplog.text
        file.append(sample(0))
        with open_samples(tmp_path / "samples.jsonl") as other:
            other.append(sample(1))
            with pytest.raises(RunLostError, match="was changed while its run was computed"):
                file.append(sample(1))
    assert [path.name for path in tmp_path.iterdir()] == ["samples.jsonl"]


def test_who_waits_for_a_cell_pauses_whatever_its_lock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen free and found busy again and again: it took all of a core."""
    told: list[str] = []
    recorder: Any = SimpleNamespace(busy={Path("a"): RunBusyError("busy", Path("a"))})
    monkeypatch.setattr(compute, "holder", lambda folder: None)
    monkeypatch.setattr(compute, "run_cells", lambda cells, recorder: told.append("tried"))

    def pause(seconds: float) -> None:
        told.append(f"waited {seconds}")
        if len(told) > 4:
            recorder.busy.clear()

    monkeypatch.setattr(compute, "time", SimpleNamespace(sleep=pause))
    cells: Any = {Path("a"): "cell"}
    compute._take_over(cells, recorder, waits=True)
    assert told == ["waited 1.0", "tried", "waited 1.0", "tried", "waited 1.0", "tried"]
