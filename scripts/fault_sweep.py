"""The sweep that `faults.py` breaks: how it is started, who belongs to it, and what is left of it at its end."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

Json: TypeAlias = "dict[str, Json] | list[Json] | str | float | bool | None"
Lines = dict[str, list[bytes]]
"""The samples of every cell, by its folder."""

EXAMPLES = 20
CELLS = [(policy, budget) for policy in ("streamingllm", "snapkv", "h2o", "caote_tova") for budget in (40, 64, 96)]
SWEEP = (
    "-m",
    f"policy={','.join(dict.fromkeys(policy for policy, _ in CELLS))}",
    f"budget={','.join(str(budget) for budget in dict.fromkeys(budget for _, budget in CELLS))}",
    "task.lengths=[128,256]",
    "task.depths=[0.0,0.25,0.5,0.75,1.0]",
    "task.repeats=2",
    "task.max_new_tokens=8",
)
SAMPLES = "samples.jsonl"
TIMES = ("seconds", "ms_per_token", "shared_prefill", "rows_in_flight", "n_shared", "computed_from")  # may differ
SHARDS = "*/shard-*/shard.jsonl"
MEASURED = {"engine.json"}  # by the engine itself, session by session: never the same twice
TOKEN = "KVBENCH_FAULTS"  # in the environment of every process of a sweep, however it was started
PATIENCE = 900.0  # seconds that one sweep may take


@dataclass
class Sweep:
    """A sweep in a folder: clients that are started, killed and started again."""

    out: Path
    extra: tuple[str, ...] = ()  # the launcher, say
    token: str = field(default_factory=lambda: f"{random.randrange(10**12)}")

    def start(self, before: str = "", **environment: str) -> subprocess.Popen[bytes]:
        """One client, as a user starts it; before: Python that its process runs first."""
        run = "import runpy; runpy.run_module('kvbench', run_name='__main__', alter_sys=True)"
        how = ["-c", f"{before}\n{run}"] if before else ["-m", "kvbench"]
        command = [sys.executable, *how, *SWEEP, f"out={self.out}", *self.extra]
        env = {**os.environ, "OMP_NUM_THREADS": "1", **environment, TOKEN: self.token}
        with self.log.open("ab") as log:
            return subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)

    def run(self, before: str = "") -> int:
        """One client from its start to its end, and all workers that outlive it; its exit code."""
        code = self.start(before).wait(PATIENCE)
        self.wait()
        return code

    def wait(self) -> None:
        """Wait for all processes of the sweep."""
        until = time.monotonic() + PATIENCE
        while self.processes():
            assert time.monotonic() < until, f"still running: {self.processes()}, see {self.log}"
            time.sleep(0.05)

    def processes(self) -> list[int]:
        """All living processes of the sweep, those that left their parents too, and helpers such as W&B's."""
        wanted, found = f"{TOKEN}={self.token}".encode(), list[int]()
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if wanted in (path / "environ").read_bytes().split(b"\0") and b"Z" not in _state(path):
                    found.append(int(path.name))
            except OSError:  # it has ended meanwhile
                continue
        return found

    def kill(self, process: int) -> bool:
        """Kill one of them as nothing can prevent; False where it had ended."""
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def kill_all(self) -> None:
        """End whatever is left of the sweep."""
        while left := self.processes():
            for process in left:
                self.kill(process)
            time.sleep(0.05)

    @property
    def log(self) -> Path:
        """What all clients said."""
        return self.out.with_name(f"{self.out.name}.log")

    def said(self) -> str:
        """The text of `log`."""
        return self.log.read_text(encoding="utf-8") if self.log.exists() else ""

    def lines(self) -> Lines:
        """The whole lines of every cell's samples, by the cell's folder; those of its shards too."""
        found: dict[str, dict[bytes, None]] = {}
        for pattern in (SHARDS, f"*/{SAMPLES}"):  # in this order: lines move from shards to their run
            for path in self.out.glob(pattern):
                lines = found.setdefault(path.relative_to(self.out).parts[0], {})
                with suppress(FileNotFoundError):  # it was put together meanwhile
                    lines |= dict.fromkeys(
                        one for one in path.read_bytes().splitlines(keepends=True) if one[-1:] == b"\n"
                    )
        return {name: list(lines) for name, lines in found.items()}


def _state(process: Path) -> bytes:
    return (process / "stat").read_bytes().rpartition(b")")[2][:3]


def timeless(value: Json) -> Json:
    """A value of a JSON file without what differs from run to run: seconds, and how many were computed together."""
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if not any(word in k for word in TIMES)}
    return [timeless(item) for item in value] if isinstance(value, list) else value


def content(path: Path) -> Json:
    """What a result file says, seconds aside."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        return [timeless(json.loads(line)) for line in text.splitlines()]
    if path.suffix == ".json":
        return timeless(json.loads(text))
    return re.sub(rf"{re.escape(str(path.parents[2]))}/[\w-]+", "OUT", text)  # where it lies is part of its config


def compare(whole: Path, broken: Path) -> list[str]:
    """Sentences for all that a broken sweep left otherwise than a whole one; none where they are equal."""
    folders = [{path.parent.name for path in place.glob(f"*/{SAMPLES}")} for place in (whole, broken)]
    wrong = [f"{name} is only in one of them" for name in sorted(folders[0] ^ folders[1])]
    for name in sorted(folders[0] & folders[1]):
        ours, theirs = ({path.name for path in (place / name).iterdir()} - MEASURED for place in (broken, whole))
        wrong += [f"{name}: {left} is left over" for left in sorted(ours - theirs)]
        wrong += [f"{name}: {left} is missing" for left in sorted(theirs - ours)]
        for file in sorted(ours & theirs):
            try:
                same = content(whole / name / file) == content(broken / name / file)
            except ValueError as error:
                wrong.append(f"{name}/{file} cannot be read ({error})")
                continue
            wrong += [] if same else [f"{name}/{file} differs"]
    return wrong


def lost(seen: Lines, now: Lines) -> list[str]:
    """Sentences for samples that were on disk once and are not there now, seconds included."""
    return [
        f"{name}: {len(gone)} finished samples were lost"
        for name, lines in seen.items()
        if (gone := set(lines) - set(now.get(name, ())))
    ]
