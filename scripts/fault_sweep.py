"""The sweep that `faults.py` breaks: how it is started, who belongs to it, and what is left of it at its end."""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO, Protocol, TypeAlias

Json: TypeAlias = "dict[str, Json] | list[Json] | str | float | bool | None"

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
FILES = ("samples.jsonl", "metrics.json", "config.yaml", "environment.json")
TIMES = ("seconds", "ms_per_token", "shared_prefill", "rows_in_flight", "n_shared", "computed_from")  # may differ
SHARDS = "*/shard-*/shard.jsonl"
MEASURED = {"engine.json"}  # by the engine itself, session by session: never the same twice
TOKEN = "KVBENCH_FAULTS"  # in the environment of every process of a sweep, however it was started
PATIENCE = 900.0  # seconds that one sweep may take


class Client(Protocol):
    """A process that computes the sweep."""

    pid: int

    def poll(self) -> int | None:
        """The exit code of one that has ended."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended."""
        ...


class Forked:
    """A process that is a fork of this one, in which everything is imported and nothing was computed.

    command: `python -m kvbench` or `python -m kvbench.sweep` with arguments, which is all that it does. It can stand in
    for `subprocess.Popen`.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        stdout: BinaryIO,
        stdin: int | None = None,
        **_: object,
    ) -> None:
        ours, self._stdin = os.pipe()  # its end is closed when this process is gone, however it went
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.dup2(ours if stdin == subprocess.PIPE else os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(stdout.fileno(), 1)
            os.dup2(stdout.fileno(), 2)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # the ends of others' pipes, which must close when we do
            os._exit(_command(command, env))
        os.close(ours)

    def poll(self) -> int | None:
        """The exit code of one that has ended."""
        if self.returncode is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.returncode = os.waitstatus_to_exitcode(status)
                os.close(self._stdin)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended."""
        until = time.monotonic() + (PATIENCE if timeout is None else timeout)
        while self.poll() is None:
            assert time.monotonic() < until, f"{self.pid} is still running"
            time.sleep(0.02)
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        """Ask it to end."""
        os.kill(self.pid, signal.SIGTERM)


def _command(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """What a fork does: a command line of kvbench, as the only thing of its process."""
    try:
        os.setsid()
        os.environ.clear()
        os.environ.update(environment)
        Path("/proc/self/comm").write_text(environment[TOKEN], encoding="utf-8")  # /proc shows no fork's environment
        module, arguments = command[2], [*command[3:]]
        sys.argv = [module, *arguments]
        if module == "kvbench":
            from kvbench.cli import main
        else:
            from kvbench.sweeps.command import main
        from kvbench.sweeps import local

        local.subprocess = SimpleNamespace(Popen=Forked, PIPE=subprocess.PIPE)  # type: ignore[assignment] # its workers
        code = main(arguments)
        sys.stdout.flush()
        return code
    except BaseException:
        traceback.print_exc()
        return 70


def preload() -> None:
    """Import what clients and workers need, on one thread, so that forks of this process can compute."""
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    for name in (
        "kvbench.cli",
        "kvbench.sweeps.local",
        "kvbench.sweeps.work",
        "kvbench.engine.run",
        "kvbench.report.table",
        "kvbench.report.trackers.watching",
    ):
        importlib.import_module(name)
    importlib.import_module("transformers.models.llama.modeling_llama")


@dataclass
class Sweep:
    """A sweep in a folder: clients that are started, killed and started again."""

    out: Path
    extra: tuple[str, ...] = ()  # the launcher, say
    environment: Mapping[str, str] = field(default_factory=dict)
    forks: bool = False  # processes are forked from this one, which saves each of them seconds of imports
    token: str = field(default_factory=lambda: f"f{random.randrange(10**12)}")  # fits into the name of a process
    _forked: list[Forked] = field(default_factory=list)

    def start(self, *more: str, before: str = "", **environment: str) -> Client:
        """One client, as a user starts it; before: Python that its process runs first."""
        run = "import runpy; runpy.run_module('kvbench', run_name='__main__', alter_sys=True)"
        how = ["-c", f"{before}; {run}"] if before else ["-m", "kvbench"]
        command = [sys.executable, *how, *SWEEP, f"out={self.out}", *self.extra, *more]
        own = {"OMP_NUM_THREADS": "1", **self.environment, **environment, TOKEN: self.token}
        env = {**os.environ, **own}
        with self.log.open("ab") as log:
            if self.forks and not before and not environment:
                self._forked.append(client := Forked(command, env=env, stdout=log))
                return client
            return subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)

    def run(self, *more: str, before: str = "", **environment: str) -> int:
        """One client from its start to its end, and all workers that outlive it; its exit code."""
        client = self.start(*more, before=before, **environment)
        code = client.wait(PATIENCE)
        self.wait()
        return code

    def finish(self, tries: int = 5) -> int:
        """Clients one after the other until one says that all is well; the exit code of the last."""
        return next((code for code in (self.run() for _ in range(tries)) if code == 0), 1)

    def wait(self) -> None:
        """Wait for all processes of the sweep."""
        until = time.monotonic() + PATIENCE
        while self.processes():
            assert time.monotonic() < until, f"still running: {self.processes()}, see {self.log}"
            time.sleep(0.05)

    def processes(self) -> list[int]:
        """All living processes of the sweep, those that left their parents too, and helpers such as W&B's."""
        wanted, found = f"{TOKEN}={self.token}".encode(), list[int]()
        for one in self._forked:
            one.poll()
        for path in Path("/proc").glob("[0-9]*"):
            try:
                is_fork = (path / "comm").read_text(encoding="utf-8").strip() == self.token
                ours = is_fork or wanted in (path / "environ").read_bytes().split(b"\0")
                if ours and b"Z" not in _state(path):
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

    def lines(self) -> dict[str, list[bytes]]:
        """The whole lines of every cell's samples, by the cell's folder; those of its shards too."""
        found: dict[str, dict[bytes, None]] = {}
        for pattern in (SHARDS, f"*/{FILES[0]}"):  # in this order: lines move from shards to their run
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
    folders = [{path.parent.name for path in place.glob(f"*/{FILES[0]}")} for place in (whole, broken)]
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


def lost(seen: Mapping[str, Sequence[bytes]], now: Mapping[str, Sequence[bytes]]) -> list[str]:
    """Sentences for samples that were on disk once and are not there now, seconds included."""
    return [
        f"{name}: {len(gone)} finished samples were lost"
        for name, lines in seen.items()
        if (gone := set(lines) - set(now.get(name, ())))
    ]


def place_for(name: str) -> Path:
    """An empty folder of its own."""
    return Path(tempfile.mkdtemp(prefix=f"kvbench-faults-{name}-"))
