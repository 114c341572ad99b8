"""A run in shards is the run: the same files, whoever computes which part of it, and whenever somebody is killed."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shown_tables import shown_rows

from kvbench.cli import main
from kvbench.engine import run_writer as running
from kvbench.engine.run import run_cells
from kvbench.engine.watch import Nobody
from kvbench.identity.cell import Cell
from kvbench.records.definition import read_definition, write_definition
from kvbench.records.locks import RunBusyError, take
from kvbench.records.sample import Sample
from kvbench.records.samples import SampleFile, open_samples
from kvbench.records.shards import Shard, on_disk, shard_folders
from kvbench.sweeps.command import main as follow
from kvbench.sweeps.shares import Piece, write_share
from kvbench.tools.diagnose import cells_of

SMALL = ("task=niah", "task.lengths=[300]", "task.depths=[0.0,0.5,1.0]", "task.repeats=2", "task.max_new_tokens=2")
Build = Callable[..., Cell]


@pytest.fixture
def build(tiny_model: Path, tmp_path: Path) -> Build:
    """A cell of six examples, computed one by one."""

    def built(out: str, *fields: str) -> Cell:
        given = (f"model={tiny_model}", "policy=tova", "budget=40", f"out={tmp_path / out}", "device=cpu", *SMALL)
        (cell,) = cells_of([*given, "engine.rows=1", "limit=null", *fields])
        return cell

    return built


def shard(cell: Cell, number: int, of: int) -> Cell:
    return replace(cell, shard=Shard(number, of))


def plain(value: Any) -> Any:
    """JSON without seconds."""
    if isinstance(value, dict):
        timed = ("decode_ms_per_token", "computed_from")
        return {k: plain(v) for k, v in value.items() if "seconds" not in k and k not in timed}
    return [plain(v) for v in value] if isinstance(value, list) else value


def files(cell: Cell) -> dict[str, Any]:
    """All that lies in a run's folder, without seconds, and without the folder's name."""
    found: dict[str, Any] = {}
    for path in cell.folder.iterdir():
        text = path.read_text()
        if path.suffix == ".yaml":
            found[path.name] = text.replace(str(cell.out), "OUT")
        else:
            found[path.name] = [
                plain(json.loads(one)) for one in (text.splitlines() if "jsonl" in path.name else [text])
            ]
    return found


class Told(Nobody):
    """Hears of examples."""

    def __init__(self) -> None:
        self.computed: list[int] = []
        self.run: list[str] = []

    def started(self, cell: Cell, done: Sequence[Sample], total: int) -> None:
        if cell.shard is None:
            self.run.append(f"started {len(done)} of {total}")

    def finished(self, cell: Cell, sample: Sample) -> None:
        (self.run if cell.shard is None else self.computed).append(sample.index)  # type: ignore[arg-type]

    def ended(self, cell: Cell, error: Exception | None) -> None:
        if cell.shard is None:
            self.run.append(f"ended {error}")


def compute(*cells: Cell) -> Told:
    """Compute cells one after the other, as processes would."""
    told = Told()
    for cell in cells:
        (ending,) = run_cells([cell], told)
        assert ending.error is None
    return told


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2)])
def test_a_run_in_shards_leaves_the_files_of_a_whole_one(build: Build, order: tuple[int, ...]) -> None:
    whole, split = build("whole"), build("split")
    compute(whole)
    told = compute(*(shard(split, number, 3) for number in order))
    assert files(split) == files(whole)
    assert set(files(whole)) == {"samples.jsonl", "metrics.json", "config.yaml", "environment.json"}
    assert sorted(told.computed) == [0, 1, 2, 3, 4, 5]
    assert told.run == ["started 0 of 6", *range(6), "ended None"], "a tracker is told of the run, and once"


def torn(cell: Cell) -> dict[int, bytes]:
    """Leave of a run its first shard of two, and of the second a line and a half; return the whole lines."""
    compute(shard(cell, 1, 2))
    compute(shard(build_other(cell), 2, 2))
    second = Shard(2, 2).folder(cell.folder) / "shard.jsonl"
    source = Shard(2, 2).folder(build_other(cell).folder)
    second.parent.mkdir()
    for path in source.iterdir():
        (second.parent / path.name).write_bytes(path.read_bytes())
    content = second.read_bytes().splitlines(keepends=True)
    second.write_bytes(content[0] + content[1][:50])
    lines = (Shard(1, 2).folder(cell.folder) / "shard.jsonl").read_bytes().splitlines(keepends=True) + content[:1]
    return {json.loads(line)["index"]: line for line in lines}


def build_other(cell: Cell) -> Cell:
    """The same cell in another folder: there its last shard is not put together with the others."""
    other = cell.out.with_name("other")
    other.mkdir(exist_ok=True)
    return replace(cell, out=other)


@pytest.mark.parametrize("rest", [[(2, 2)], [(1, 2), (2, 2)], [(1, 3), (2, 3), (3, 3)], [None], [(4, 4), (2, 4)]])
def test_what_killed_shards_left_is_not_computed_again(build: Build, rest: list[tuple[int, int] | None]) -> None:
    """Whoever goes on: the same shards, other ones, or one process; of four shards two have what is missing."""
    whole, split = build("whole"), build("split")
    compute(whole)
    lines = torn(split)
    assert set(lines) == {0, 1, 2, 4}
    assert on_disk(split.folder) == {0, 1, 2, 4}
    compute(*(split if one is None else shard(split, *one) for one in rest))
    assert files(split) == files(whole)
    written = (split.folder / "samples.jsonl").read_bytes().splitlines(keepends=True)
    assert {index: written[index] for index in lines} == lines, "seconds and all"


def test_a_larger_limit_continues_and_a_smaller_one_loses_nothing(build: Build) -> None:
    split = build("split", "limit=6")
    compute(shard(split, 1, 2))  # 0, 2 and 4
    compute(replace(split, limit=2))
    assert on_disk(split.folder) == {0, 1, 2, 4}
    told = compute(shard(split, 2, 2))
    assert told.computed == [3, 5]
    assert not shard_folders(split.folder)
    assert [s["index"] for s in files(split)["samples.jsonl"]] == [0, 1, 2, 3, 4, 5]


class Killed(BaseException):
    """As kill -9, but for what Python does on the way out."""


@pytest.mark.parametrize("moment", ["first line", "fourth line", "between lines", "removing", "removed", "metrics"])
def test_a_merge_that_is_killed_is_finished_by_the_next(
    build: Build, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, split = build("whole"), build("split")
    compute(whole, shard(split, 1, 2))
    append, remove = SampleFile.append, running.remove
    with monkeypatch.context() as patch:
        if "line" in moment:
            stop = {"first line": 0, "fourth line": 3, "between lines": 3}[moment]

            def appending(file: SampleFile, sample: Sample) -> None:
                if file.path.name == "samples.jsonl" and sample.index == stop:
                    if moment == "between lines":
                        append(file, sample)
                    raise Killed
                append(file, sample)

            patch.setattr(SampleFile, "append", appending)
        elif moment == "metrics":
            patch.setattr(running, "write_metrics", lambda *_: (_ for _ in ()).throw(Killed))
        else:

            def removing(folder: Path) -> None:
                if moment == "removed":
                    remove(folder)
                else:
                    (folder / "shard.jsonl").unlink()
                raise Killed

            patch.setattr(running, "remove", removing)
        with pytest.raises(Killed):
            run_cells([shard(split, 2, 2)])
    assert on_disk(split.folder) == set(range(6))
    assert not (split.folder / "metrics.json").exists()
    assert compute(shard(split, 1, 2)).computed == []
    assert files(split) == files(whole)


def test_a_run_and_its_shards_are_never_computed_at_once(build: Build) -> None:
    split = build("split")
    folder = Shard(1, 2).folder(split.folder)
    folder.mkdir(parents=True)
    with open_samples(folder / "shard.jsonl", whole=False):
        for other in (split, shard(split, 1, 2), shard(split, 1, 3)):
            (ending,) = run_cells([other])
            assert isinstance(ending.error, RunBusyError)
            assert ending.error.folder == folder
        (ending,) = run_cells([shard(split, 2, 2)])
        assert ending.error is None
    lock = take(split.folder)
    (ending,) = run_cells([shard(split, 1, 2)])
    assert isinstance(ending.error, RunBusyError)
    assert ending.error.folder == split.folder
    lock.close()
    compute(shard(split, 1, 2))
    assert set(files(split)) == {"samples.jsonl", "metrics.json", "config.yaml", "environment.json"}


class Asked:
    """A prompt, as far as shards look at it."""

    def __init__(self, context: str | None) -> None:
        self.context_hash = context


@given(
    contexts=st.lists(st.sampled_from([None, "a", "b", "c"]), max_size=30),
    of=st.integers(1, 7),
    limit=st.integers(0, 30),
)
def test_every_example_is_in_one_shard_with_those_of_its_context_under_any_limit(
    contexts: list[str | None], of: int, limit: int
) -> None:
    prompts: Any = [Asked(context) for context in contexts]
    shards = [Shard(number, of).members(prompts) for number in range(1, of + 1)]
    assert sorted(index for members in shards for index in members) == list(range(len(prompts)))
    place = {index: number for number, members in enumerate(shards) for index in members}
    for index in range(1, len(contexts)):
        if contexts[index] is not None and contexts[index] == contexts[index - 1]:
            assert place[index] == place[index - 1]
    assert [Shard(n + 1, of).members(prompts[:limit]) for n in range(of)] == [
        [i for i in s if i < limit] for s in shards
    ]


def test_a_shard_that_fails_says_why_for_its_cell_until_it_is_tried_again(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["-m", f"model={tiny_model}", "policy=tova", "budget=40", "out=runs", "engine.rows=1", *SMALL]
    assert main([*command, "limit=1"]) == 0
    definition = read_definition(Path("runs"))
    (entry,) = definition.cells
    entry = replace(entry, limit=None, config={**entry.config, "limit": None})
    write_definition(Path("runs"), replace(definition, cells=(entry,)))
    for share, number in (("one", 1), ("two", 2)):
        write_share(Path("runs"), share, [Piece(entry, Shard(number, 2))])
    folder = Shard(2, 2).folder(Path("runs") / entry.key)
    folder.mkdir()
    (folder / "shard.jsonl").write_text("no sample\n{}\n")
    assert follow(["work", "runs", "--share", "one"]) == 0
    assert follow(["work", "runs", "--share", "two"]) == 1
    capsys.readouterr()
    assert follow(["status", "runs"]) == 0
    said = capsys.readouterr().out
    assert " failed " in said
    assert "line 1: not the sample of an example" in said
    assert said.splitlines()[-1] == "1 cell: 1 failed; 3 of 6 examples"  # 0 before, then 2 and 4
    (folder / "shard.jsonl").unlink()
    assert follow(["work", "runs", "--share", "two", "--log", "two.log"]) == 0
    said = capsys.readouterr().err
    assert f": finished, see runs/{entry.key}\n" in said
    assert ": shard 2of2 is on disk\n" in said
    assert follow(["status", "runs"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 cell: 1 finished; 6 of 6 examples"


@pytest.mark.slow("starts processes")
def test_workers_share_the_examples_of_a_lone_cell_and_of_a_sweep(tmp_path: Path, tiny_model: Path) -> None:
    command = [sys.executable, "-m", "kvbench", f"model={tiny_model}", "budget=40", "engine.rows=1", *SMALL]
    for out, more in (("lone", ["policy=tova"]), ("sweep", ["-m", "policy=tova,full"])):
        tables = []
        for name, launcher in ((f"{out}-one", []), (f"{out}-two", ["launcher.workers=2", "launcher.shards=3"])):
            done = subprocess.run(
                [*command, *more, *launcher, f"out={name}"],
                cwd=tmp_path,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            # Policy, budget and score; seconds, which do not fit beside them, have rows of their own.
            tables.append([row[:3] for row in shown_rows(done.stdout) if "(" in row[2]])
        assert tables[0] == tables[1]
        one, two = (
            {
                str(path.relative_to(tmp_path / name)): [
                    plain(json.loads(line)) for line in path.read_text().splitlines()
                ]
                for path in (tmp_path / name).rglob("*.jsonl")
            }
            for name in (f"{out}-one", f"{out}-two")
        )
        assert one == two
        assert len(two) == len(tables[0])
    said = subprocess.run(
        [sys.executable, "-m", "kvbench.sweep", "status", "sweep-two"], cwd=tmp_path, capture_output=True, text=True
    ).stdout
    assert said.splitlines()[-1] == "2 cells: 2 finished; 12 of 12 examples"
