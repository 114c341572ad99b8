"""Claims: one process computes a run, a dead one's run is taken over, and no clock or lock is needed for it."""

import errno
import fcntl
import json
import os
import threading
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from kvbench.runs import claims
from kvbench.runs.claims import RunBusyError, RunLostError, look, owner_of, take
from kvbench.runs.sample import Sample
from kvbench.runs.samples import open_samples


def sample(index: int) -> Sample:
    return Sample(index=index, prompt_hash="ab" * 32, prompt_tokens=100, references=["a"], output="a", score=1.0)


def beat(folder: Path, number: int = 1) -> None:
    """Count a claim up as its owner on another machine would."""
    path = folder / f".claim-{number}"
    content = path.read_bytes()
    path.write_bytes(f"{int(content[:12]) + 1:012d}".encode() + content[12:])


def claimed_elsewhere(folder: Path, number: int = 1) -> None:
    """A claim of a process on another machine."""
    owner = replace(claims._me(), host="far", pid=7, world="another machine")
    (folder / f".claim-{number}").write_bytes(b"0" * 12 + f" {json.dumps(asdict(owner))}\n".encode())


def test_a_claim_is_gone_once_it_is_released(tmp_path: Path) -> None:
    claim = take(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".claim-1"]
    with pytest.raises(RunBusyError, match=f"belongs to process {os.getpid()} on "):
        take(tmp_path)
    claim.release()
    assert not list(tmp_path.iterdir())
    take(tmp_path).release()


def test_an_owner_elsewhere_that_shows_no_life_is_taken_over_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "PATIENCE_SECONDS", 0.2)
    claimed_elsewhere(tmp_path)
    with pytest.raises(RunBusyError, match="belongs to process 7 on far"):
        take(tmp_path)
    time.sleep(0.1)
    assert look(tmp_path) is None  # not yet known
    time.sleep(0.15)
    assert look(tmp_path) is True
    take(tmp_path)
    assert str(owner_of(tmp_path)).startswith(f"process {os.getpid()} on ")


@pytest.mark.parametrize("modified", [0, 4_000_000_000])
def test_an_owner_that_counts_on_lives_whatever_the_clocks_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modified: int
) -> None:
    monkeypatch.setattr(claims, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(time, "time", lambda: float(modified))
    claimed_elsewhere(tmp_path)
    assert look(tmp_path) is None
    for _ in range(5):
        time.sleep(0.06)
        beat(tmp_path)
        os.utime(tmp_path / ".claim-1", (modified, modified))
        assert look(tmp_path) is False
    with pytest.raises(RunBusyError):
        take(tmp_path)


def test_of_many_who_see_a_dead_owner_one_takes_over(tmp_path: Path) -> None:
    dead = replace(claims._me(), started="1")  # this process's number, but given to another one since
    (tmp_path / ".claim-3").write_bytes(b"0" * 12 + f" {json.dumps(asdict(dead))}\n".encode())
    won: list[claims.Claim] = []
    together = threading.Barrier(8)  # seen to fail where the dead one's claim was removed at once

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
    won[0].release()
    assert not list(tmp_path.iterdir())  # the dead one's claim is gone too


def test_an_owner_that_was_only_asleep_stops_before_its_next_line(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    with open_samples(path) as file:
        file.append(sample(0))
        written = path.read_bytes()
        claimed_elsewhere(tmp_path, number=2)  # somebody thought it dead
        with pytest.raises(RunLostError, match="taken over by another process"):
            file.append(sample(1))
        (tmp_path / ".claim-2").unlink()
        claimed_elsewhere(tmp_path, number=1)  # and a third one began after that had ended
        with pytest.raises(RunLostError, match="taken over by another process"):
            file.append(sample(1))
    assert path.read_bytes() == written
    assert (tmp_path / ".claim-1").exists()  # another one's claim is not given free


def test_where_the_file_system_has_no_locks_the_claim_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with open_samples(tmp_path / "samples.jsonl") as file:
        with pytest.raises(RunBusyError), open_samples(tmp_path / "samples.jsonl"):
            pass
        file.append(sample(0))
    assert [path.name for path in tmp_path.iterdir()] == ["samples.jsonl"]


def test_a_claim_without_a_name_is_one_that_has_to_be_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner was killed between making the file and writing into it."""
    monkeypatch.setattr(claims, "PATIENCE_SECONDS", 0.05)
    (tmp_path / ".claim-1").touch()
    with pytest.raises(RunBusyError, match="belongs to somebody"):
        take(tmp_path)
    time.sleep(0.1)
    take(tmp_path).release()


def test_the_owner_shows_life_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(claims, "_HEART", claims._Heart())
    claim = take(tmp_path)
    first = (tmp_path / ".claim-1").read_bytes()
    deadline = time.monotonic() + 10
    while (now := (tmp_path / ".claim-1").read_bytes()) == first:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert now[12:] == first[12:]
    claim.check()
    claim.release()
