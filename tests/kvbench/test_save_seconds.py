"""engine.save_seconds: what a killed process may lose; samples are written while other examples are computed."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbench.cli import main
from kvbench.engine.pace import Pace, Work

DIARY = '''
"""A scorer that records the time at which each prompt is scored, and the samples that are then on disk."""

import json
import time
from dataclasses import dataclass
from pathlib import Path

from kvbench.policies.needs import Needs
from kvbench.policies.scorers.scorer import Scorer


@dataclass(frozen=True)
class Diary(Scorer):
    """Keeps short keys."""

    needs = Needs(layer=True)

    def score(self, observation, state):
        if observation.layer == 0:
            written = {path.parent.name: path.read_text().count("\\n") for path in Path("runs").glob("*/samples.jsonl")}
            with open("diary.jsonl", "a") as file:
                file.write(json.dumps([time.time(), float(observation.keys.sum()), min(written.values())]) + "\\n")
        return -observation.keys.float().norm(dim=-1)
'''
MANY = 30  # examples of the runs that are killed


def task(examples: int) -> tuple[str, ...]:
    return (f"task.lengths={list(range(400, 400 + 10 * examples, 10))}", "task.depths=[0.5]", "task.repeats=1")


RUNS = ("policy=diary", "budget=40,60", "schedule=prompt", "decode=grow", "out=runs")


@pytest.fixture
def diary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_conf/policy").mkdir(parents=True)
    (tmp_path / "my_conf/policy/diary.yaml").write_text(
        "_target_: kvbench.policies.policy.Policy\nscorer: {_target_: diary_scorers.Diary}\n"
    )
    (tmp_path / "diary_scorers.py").write_text(DIARY)
    yield tmp_path / "diary.jsonl"
    sys.modules.pop("diary_scorers", None)


def starts(diary: Path) -> list[tuple[float, int]]:
    """Of every example that started, in order: the time, and the number of examples that all runs had on disk."""
    first: dict[float, tuple[float, int]] = {}
    for line in diary.read_text().splitlines():
        began, prompt, written = json.loads(line)
        first.setdefault(prompt, (began, written))
    return list(first.values())


def on_disk() -> list[int]:
    """The number of complete samples of each run."""
    return [path.read_bytes().count(b"\n") for path in sorted(Path("runs").glob("*/samples.jsonl"))]


@pytest.mark.parametrize("seconds", [0, 1000])
def test_zero_computes_one_example_at_a_time_and_more_fills_the_batch(
    seconds: int, diary: Path, tiny_model: Path
) -> None:
    command = ["--config-dir", "my_conf", "-m", f"model={tiny_model}", *RUNS, *task(6), "task.max_new_tokens=12"]
    assert main([*command, f"engine.save_seconds={seconds}"]) == 0
    found = starts(diary)
    assert len(found) == 6
    unwritten = [place - written for place, (_, written) in enumerate(found)]
    assert max(unwritten) == 0 if seconds == 0 else max(unwritten) >= 4


@pytest.mark.parametrize("answer", [50, 20, 8, 1])
@pytest.mark.parametrize("runs", [1, 6])
@pytest.mark.parametrize("costs", [(2e-3, 0.01, 0.01), (0, 0.02, 0), (0, 0, 0.02), (4e-3, 0, 0), (1.5e-3, 0.2, 0.005)])
def test_examples_that_start_together_are_on_disk_in_time(
    runs: int, costs: tuple[float, float, float], answer: int
) -> None:
    """costs: seconds of a prefill for each token and run; of a step, and in addition for each of its rows.

    answer: the steps that an example takes, of 50 that it may take.
    """
    per_token, fixed, per_row = costs
    pace, bound, tokens, steps = Pace(10.0), 10.0, 500, 50
    alone = per_token * tokens * runs + answer * (fixed + per_row * runs)
    now, flights, longest, most = 0.0, [], 0.0, 0
    for _ in range(300):
        while len(flights) < 20:
            started = [Work(now - begin, tokens, steps, left) for begin, left in flights]
            in_flight = len(flights) * runs
            if flights and not pace.may_start(started, Work(0.0, tokens, steps, steps), in_flight, runs):
                break
            seconds, begin = per_token * tokens * runs, now
            now += seconds
            pace.prefilled(tokens, runs, seconds)
            flights.append((begin, steps))
        rows, most = len(flights) * runs, max(most, len(flights))
        seconds = fixed + per_row * rows
        now += seconds
        pace.stepped(rows, seconds)
        flights = [(begin, left - 1) for begin, left in flights]
        longest = max([longest, *(now - begin for begin, left in flights if left == steps - answer)])
        flights = [flight for flight in flights if flight[1] > steps - answer]
    assert longest <= max(bound, 2 * alone) * 1.001
    assert most > 1 or 4 * alone > bound


@pytest.mark.slow("kills a process at every second of its run")
def test_a_kill_loses_no_example_that_started_save_seconds_before(diary: Path, tiny_model: Path) -> None:
    bound = 2.0
    words = ["--config-dir", "my_conf", "-m", f"model={tiny_model}", *RUNS, *task(MANY), "task.max_new_tokens=60"]
    command = [sys.executable, "-m", "kvbench", *words, f"engine.save_seconds={bound}"]

    seconds, ended, kills = 1, None, 0
    while ended != 0:
        diary.unlink(missing_ok=True)
        before = on_disk() or [0, 0]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while process.poll() is None and not diary.exists():
            time.sleep(0.02)
        try:
            ended = process.wait(seconds)
            assert ended == 0
        except subprocess.TimeoutExpired:
            killed, kills = time.time(), kills + 1
            process.kill()
            process.wait()
            late = sum(killed - began > 3 * bound for began, _ in starts(diary))  # three times: the machine may be busy
            assert min(on_disk()) >= min(before) + late
            seconds = seconds % 8 + 1
    assert on_disk() == [MANY, MANY]
    assert kills >= 2
