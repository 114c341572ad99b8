"""What a sweep is cut into, how it is kept in its folder, and what others see of it there."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from sweep_files import entry, note, program, summed_up

from kvbench.cli import main
from kvbench.config.tree import build, find, load
from kvbench.records.cell_state import CellState, is_complete, read_states, state_path, write_state
from kvbench.records.definition import Definition, Entry, read_definition, write_definition
from kvbench.sweeps.command import main as sweep
from kvbench.sweeps.launcher import defined
from kvbench.sweeps.plan import Planned
from kvbench.sweeps.queue import job_states
from kvbench.sweeps.shares import Piece, cut
from kvbench.sweeps.slurm import Slurm

SMALL = ("task.lengths=[300]", "task.depths=[0.5]", "task.repeats=3", "task.max_new_tokens=3")


def worded(name: str, limit: int | None = 4) -> Entry:
    """An entry with a configuration of its own."""
    return replace(entry(name, limit=limit), config={"budget": 64, "policy": {"name": name}, "limit": limit})


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6), shares=st.integers(1, 30) | st.none())
def test_every_cell_is_in_one_share_and_no_share_is_empty(sizes: list[int], shares: int | None) -> None:
    cells = [Piece(entry(f"{task}-{i}", f"task{task}")) for task, size in enumerate(sizes) for i in range(size)]
    found = cut(cells, shares)
    assert sorted(p.entry.key for share in found for p in share) == sorted(p.entry.key for p in cells)
    assert all(found)
    assert len(found) == (len(sizes) if shares is None else min(shares, len(cells)))
    tasks = [{p.entry.task for p in share} for share in found]
    if shares is not None and shares >= len(sizes):
        assert all(len(one) == 1 for one in tasks)  # what shares a prefill is cut, never mixed
    else:
        assert all(sum(task in one for one in tasks) == 1 for task in {p.entry.task for p in cells})


def test_a_definition_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    cells = (worded("a"), replace(entry("b"), run_id=None, identity=None, error="no", code=2), worded("c", limit=None))
    written = Definition("s", ("one",), "/here", {"_target_": "x"}, {"python": "3"}, cells)
    write_definition(tmp_path, written)
    assert read_definition(tmp_path) == written
    later = Definition("s", ("two",), "/there", {}, {}, (worded("d"), worded("a", limit=9)))
    write_definition(tmp_path, later)
    both = read_definition(tmp_path)
    assert [(e.key, e.limit) for e in both.cells] == [("policy=b", 4), ("c", None), ("d", 4), ("a", 9)]
    assert both.commands == ("one", "two")
    changed = replace(worded("c"), run_id="c-of-other-code", config=worded("c", limit=None).config)
    write_definition(tmp_path, Definition("s", cells=(changed,)))
    assert [e.key for e in read_definition(tmp_path).cells] == ["policy=b", "d", "a", "c-of-other-code"]


def test_a_later_command_into_the_folder_knows_all_cells_and_computes_its_own(tmp_path: Path) -> None:
    defined(tmp_path, [Planned(worded("a"))], "s", "first", {})
    later = defined(tmp_path, [Planned(worded("b"))], "s", "second", {})
    assert later.definition is not None
    assert [cell.key for cell in later.definition.cells] == ["a", "b"]  # what the run of the whole sweep shows
    assert [planned.entry.key for planned in later.planned] == ["b"]


def test_of_two_commands_at_once_none_loses_the_cells_of_the_other(tmp_path: Path) -> None:
    names = [str(number) for number in range(24)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: write_definition(tmp_path, Definition("s", (name,), cells=(worded(name),))), names))
    both = read_definition(tmp_path)
    assert sorted(entry.key for entry in both.cells) == sorted(both.commands) == sorted(names)
    assert not list((tmp_path / ".sweep").glob(".lock"))


@pytest.mark.parametrize("text", ["cells: 3", "x: [", "", "cells: [{title: a}]\ncommands: []\nname: s"])
def test_a_damaged_definition_is_one_sentence(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sweep.yaml").write_text(text)
    assert sweep(["status", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"kvbench: {tmp_path}/sweep.yaml cannot be read: ")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("limit", "n", "said", "complete"),
    [
        (4, 4, None, True),
        (4, 9, None, True),
        (4, 3, None, False),
        (None, 3, None, False),  # of an earlier, smaller limit perhaps
        (None, 3, note(None, 3), True),
        (9, 3, note(5, 3), True),  # five were asked for, the task has three
        (9, 5, note(5, 5), False),
        (9, 3, note(9, None, "no memory"), False),
        (None, 3, note(3, 3), False),
        (4, 4, replace(note(4, 4, "out of memory"), code=1), True),
        (4, 4, replace(note(4, 4, "refused"), code=2), False),  # its data changed
    ],
)
def test_a_cell_is_complete_when_its_task_or_its_limit_is_used_up(
    tmp_path: Path, limit: int | None, n: int, said: CellState | None, complete: bool
) -> None:
    samples = summed_up(tmp_path / "a", n)
    if said is not None:
        write_state(state_path(tmp_path, "a"), said)
        assert read_states(tmp_path, "a") == {tmp_path / "a": said}
    assert is_complete(tmp_path, entry("a", limit=limit)) is complete
    lines = samples.read_text().splitlines(keepends=True)
    samples.write_text("".join(lines[:-1]))
    assert not is_complete(tmp_path, entry("a", limit=limit))  # one of its samples is gone
    samples.unlink()
    assert not is_complete(tmp_path, entry("a", limit=limit))


def test_the_status_of_a_sweep_counts_what_is_finished_failed_and_left(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["-m", f"model={tiny_model}", "policy=tova,snapkv,knorm", "budget=16", "limit=1", "out=runs", *SMALL]
    assert main(command) == 2
    (gone,) = tmp_path.glob("runs/*knorm*/metrics.json")
    gone.unlink()
    capsys.readouterr()
    assert sweep(["status", "runs"]) == 0
    said = capsys.readouterr().out
    assert [line.split()[1] for line in said.splitlines()[1:4]] == ["finished", "failed", "left"]
    assert said.splitlines()[-1] == "3 cells: 1 finished, 1 failed, 1 left; 2 of 2 examples"
    assert sweep(["resume", "runs"]) == 0
    assert sweep(["status", "runs"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "3 cells: 2 finished, 1 failed; 2 of 2 examples"
    assert sweep(["resume", "runs"]) == 0
    assert "nothing is left to do" in capsys.readouterr().err
    assert sweep(["resume", "runs", "budget=3"]) == 2  # said though nothing is left
    assert "budget=3 cannot be set" in capsys.readouterr().err
    assert sweep(["forget", "runs", "policy=tova"]) == 2
    assert "has no cell policy=tova: those that are finished, queued or running stay" in capsys.readouterr().err
    assert sweep(["forget", "runs"]) == 0
    assert capsys.readouterr().out == "forgot 1 of 3 cells:\n  policy=snapkv\n"
    assert sweep(["status", "runs"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "2 cells: 2 finished; 2 of 2 examples"
    assert sweep(["forget", "runs"]) == 2
    assert "runs has no cell that failed" in capsys.readouterr().err


def slurm(**fields: object) -> Slurm:
    file = find("launcher", "slurm")
    assert file is not None
    made = build({**load(file), **fields})
    assert isinstance(made, Slurm)
    return made


def test_the_script_says_what_the_fields_say(tmp_path: Path) -> None:
    fields = {"partition": "gpu", "account": "me", "array_parallelism": 2, "mem_gb": 0.5, "timeout_min": 60}
    made = slurm(**fields, setup=["module load cuda"], sbatch=["--qos=long"])
    script = made.script(tmp_path, "kvbench-x", "stamp", 3, Path("/here")).splitlines()
    options = {line.removeprefix("#SBATCH ") for line in script if line.startswith("#SBATCH")}
    assert {"--partition=gpu", "--account=me", "--array=0-2%2", "--mem=512M", "--time=60", "--qos=long"} <= options
    assert {"--job-name=kvbench-x", "--gpus-per-node=1", "--requeue", "--signal=B:USR1@120"} <= options
    assert "--chdir=/here" in options
    assert f"--output={tmp_path}/.sweep/logs/%A_%a.log" in options
    assert script[0] == "#!/bin/bash"
    assert script[-2] == "module load cuda"
    assert script[-1].startswith(f"exec {sys.executable} -m kvbench.sweep work {tmp_path} --share stamp-")
    assert script[-1].endswith(" --requeue")
    spaced = slurm().script(tmp_path / "my 5% runs", "n", "s", 1, tmp_path)
    assert f"#SBATCH --output='{tmp_path}/my 5%% runs/.sweep/logs/%A_%a.log'" in spaced.splitlines()
    without = slurm(gpus_per_node=0, requeue=False).script(tmp_path, "n", "s", 1, tmp_path)
    assert "gpus" not in without
    assert "--no-requeue" in without
    assert subprocess.run(["bash", "-n"], input=without, text=True, check=False).returncode == 0


def test_without_slurm_nothing_runs_here_instead(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    for flags in ([], ["-m"]):
        assert main([*flags, f"model={tiny_model}", "policy=tova", "budget=40", "launcher=slurm", "out=o", *SMALL]) == 2
        assert "launcher=slurm needs SLURM's sbatch, which is not on this machine" in capsys.readouterr().err
    assert not list(tmp_path.glob("o/*/samples.jsonl"))
    assert not list(tmp_path.glob("o/.sweep/shares/*"))  # what was not submitted leaves nothing
    assert yaml.safe_load((tmp_path / "o" / "sweep.yaml").read_text())["launcher"]["gpus_per_node"] == 1


def test_while_squeue_does_not_answer_no_job_is_thought_to_be_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    program(tmp_path, "sacct", "7_0|COMPLETED|0:0")
    program(tmp_path, "squeue", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)", 1)
    states = job_states(["7_0", "7_1"])
    assert (states["7_0"].state, states["7_0"].lives) == ("COMPLETED", False)
    assert (states["7_1"].lives, states["7_1"].about) == (True, "squeue does not answer")
    program(tmp_path, "squeue", "slurm_load_jobs error: Invalid job id specified", 1)  # of all it has forgotten
    assert list(job_states(["7_0", "7_1"])) == ["7_0"]


@pytest.mark.parametrize(
    ("sizes", "shares", "expected"),
    [([6, 2], 2, [6, 2]), ([6, 2], 4, [2, 2, 2, 2]), ([5, 1], 3, [2, 3, 1]), ([3, 3, 2], 2, [5, 3]), ([4], 1, [4])],
)
def test_shares_as_cut_by_hand(sizes: list[int], shares: int, expected: list[int]) -> None:
    cells = [Piece(entry(f"{task}-{i}", f"task{task}")) for task, size in enumerate(sizes) for i in range(size)]
    assert [len(share) for share in cut(cells, shares)] == expected
