"""What status says of a sweep and resume does with it, from its samples, its notes and SLURM's queue."""

from dataclasses import replace
from pathlib import Path

import pytest
from sweep_files import entry, note, program, summed_up

from kvbench.records.cell_state import is_complete, state_path, write_state
from kvbench.records.definition import Definition, Entry, read_definition, write_definition
from kvbench.sweeps import follow
from kvbench.sweeps.command import main as sweep
from kvbench.sweeps.jobs import Job, read_jobs, write_job
from kvbench.sweeps.shares import Piece, write_share
from kvbench.sweeps.status import statuses


def launched_here(tmp_path: Path, *cells: Entry) -> None:
    write_definition(tmp_path, Definition("s", launcher={"_target_": "kvbench.sweeps.local.Local"}, cells=cells))


def test_examples_that_failed_are_no_finished_cell_and_may_be_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched_here(tmp_path, entry("nan", limit=3), entry("small", limit=3), entry("good", limit=3))
    summed_up(tmp_path / "nan", 3, dict.fromkeys(range(3), "FloatingPointError: logits are NaN"))
    small = summed_up(tmp_path / "small", 3, {1: "OutOfMemoryError: 2 GiB", 2: "BudgetError: x"})
    summed_up(tmp_path / "good", 3)
    assert sweep(["status", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert [line.split()[1:3] for line in said.splitlines()[1:4]] == [
        ["failed", "3/3"],
        ["failed", "3/3"],
        ["finished", "3/3"],
    ]
    assert f"policy=nan: 3 of 3 examples failed, see {tmp_path}/nan; resume tries those again that ran" in said
    assert said.splitlines()[-1] == "3 cells: 1 finished, 2 failed; 9 of 9 examples, 5 failed"
    launched: list[str] = []

    def launch(out: Path, *_: object) -> int:
        launched.extend(s.entry.key for s in statuses(out, read_definition(out)) if s.is_open)
        return 0

    monkeypatch.setattr(follow, "_launch", launch)
    assert sweep(["resume", str(tmp_path)]) == 0
    assert launched == ["small"]
    assert small.read_text().count("\n") == 1  # the third one waits in a shard
    assert sweep(["resume", str(tmp_path), "--failed"]) == 0
    assert launched == ["small", "nan", "small"]


def test_a_damaged_file_of_a_run_that_was_summed_up_is_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launched_here(tmp_path, entry("a", limit=3))
    samples = summed_up(tmp_path / "a", 3)
    lines = samples.read_text().splitlines(keepends=True)
    samples.write_text(lines[0] + '{"index": 1, "prompt_ha\n' + lines[2])
    assert sweep(["status", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert f"{samples}, line 2: not the sample of example 1" in said
    assert said.splitlines()[-1].startswith("1 cell: 1 failed;")
    assert not is_complete(tmp_path, entry("a", limit=3))  # so that resume opens it, and says what is wrong


def submitted(tmp_path: Path, array: str, stamp: str, cell: Entry) -> None:
    write_share(tmp_path, f"{stamp}-0", [Piece(cell)])
    write_job(tmp_path, Job(array, stamp, 1))


def test_a_waiting_array_is_known_whatever_the_clocks_of_those_who_submitted_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Submitted in Tokyo and cancelled, then again in UTC."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:/bin:/usr/bin")
    program(programs, "sacct", "9_0|CANCELLED by 0|0:0")
    program(programs, "squeue", "10_0|PENDING|Resources")
    cell = entry("a")
    launched_here(tmp_path, cell)
    submitted(tmp_path, "9", "20261123-200000-aaaa", cell)
    submitted(tmp_path, "10", "20261123-110500-bbbb", cell)
    assert [job.array for job in read_jobs(tmp_path)] == ["9", "10"]
    (found,) = statuses(tmp_path, read_definition(tmp_path))
    assert (found.state, found.jobs) == ("queued", ("10_0",))
    submitted(tmp_path, "11", "20261123-110600-cccc", cell)  # one that SLURM does not know any more
    (found,) = statuses(tmp_path, read_definition(tmp_path))
    assert (found.state, found.jobs) == ("queued", ("10_0",)), "a living task of an earlier array counts"


@pytest.mark.parametrize(
    ("log", "error", "state"),
    [
        ("9_0", None, "running"),
        ("9_0", "it broke", "failed"),
        ("8_0", "an earlier array broke", "queued"),
        (None, None, "queued"),
    ],
)
def test_what_a_running_task_wrote_says_whether_it_has_a_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: str | None, error: str | None, state: str
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:/bin:/usr/bin")
    program(programs, "sacct", "9_0|RUNNING|0:0")
    program(programs, "squeue", "9_0|RUNNING|None")
    launched_here(tmp_path, entry("a"))
    submitted(tmp_path, "9", "20261123-200000-aaaa", entry("a"))
    said = note(4, None, error)
    write_state(state_path(tmp_path, "a"), replace(said, log=None if log is None else f"logs/{log}.log"))
    (found,) = statuses(tmp_path, read_definition(tmp_path))
    assert found.state == state
