"""What a sweep survives: kills, a full disk, a file in the place of a folder, a damaged line, a clock that jumps.

    python scripts/faults.py                                  # all of them, 100 kills
    python scripts/faults.py kills --kills 20 --clients 3
    python scripts/faults.py kills clock -- launcher.workers=2 launcher.shards=3

A sweep of 12 cells with 20 examples each runs undisturbed once, in one process; then it is broken, finished by the
same command, and all files must be equal, but for seconds and for how many examples were computed together. What stands
behind `--` is added to every command: however cells are scheduled, every process of a sweep is found by its
environment, and may be killed. Exit code 1 where anything differs.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fault_sweep import CELLS, EXAMPLES, SAMPLES, Lines, Sweep, compare, lost

CLOCK = """
import random, time
_time, _time_ns, _random = time.time, time.time_ns, random.Random({seed})
_shift = {days} * 86400.0
def _jump():
    global _shift
    if _random.random() < 0.05:
        _shift += _random.uniform(-86400.0, 86400.0)
    return _shift
time.time = lambda: _time() + _jump()
time.time_ns = lambda: _time_ns() + int(_jump() * 1e9)
"""
"""What a process does whose clock is {days} days ahead and jumps by up to a day now and then."""


FULL = """
import glob, resource, threading, time
def fill():
    while not glob.glob({samples!r}):
        time.sleep(0.05)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
threading.Thread(target=fill, daemon=True).start()
"""
"""What a process does whose disk is full once the first sample is on it."""
TRIES = 5  # commands one after the other until one says that all is well


@dataclass(frozen=True)
class Asked:
    """What the command line says."""

    kills: int
    clients: int
    seed: int
    folder: Path
    extra: tuple[str, ...]

    def sweep(self, name: str) -> Sweep:
        """A sweep in a folder of its own."""
        return Sweep(self.folder / name, self.extra)


def kills(asked: Asked, whole: Path) -> tuple[str, list[str]]:
    """Processes of a shared sweep are killed at random moments, clients and workers, until `asked.kills` have been.

    A sweep that is complete before is compared and another one begun.
    """
    draw, done, rounds, wrong = random.Random(asked.seed), 0, 0, list[str]()
    victims = {"clients": 0, "workers": 0}
    while done < asked.kills:
        sweep, seen = asked.sweep(f"kills-{rounds}"), Lines()
        clients = list[subprocess.Popen[bytes]]()
        while done < asked.kills and not _complete(sweep):
            clients = [client for client in clients if client.poll() is None]
            while len(clients) < asked.clients:
                clients.append(sweep.start())
            _moment(sweep, draw)
            wrong += lost(seen, seen := sweep.lines())
            living = sweep.processes()
            if living and sweep.kill(victim := draw.choice(living)):
                done += 1
                victims["clients" if victim in {client.pid for client in clients} else "workers"] += 1
        for client in clients:
            client.wait()
        sweep.wait()
        wrong += [f"round {rounds}: {sentence}" for sentence in finished(sweep, whole, seen)]
        rounds += 1
    return f"{done} kill -9 ({victims['clients']} clients, {victims['workers']} others) in {rounds} sweeps", wrong


def expected(sweep: Sweep, code: int, asked: int) -> list[str]:
    """Sentences where a broken command ended with another code than it should, or in a traceback."""
    wrong = [] if code == asked else [f"it ends with {code}, not {asked}"]
    return wrong + (["there is a traceback"] if "Traceback" in sweep.said() else [])


def finished(sweep: Sweep, whole: Path, seen: Lines | None = None) -> list[str]:
    """Finish a sweep by its own command; sentences for all that is otherwise than in a whole one, or was lost."""
    codes = [sweep.run()]
    while codes[-1] and len(codes) < TRIES:
        codes.append(sweep.run())
    wrong = [f"the last command ends with {codes[-1]}, see {sweep.log}"] if codes[-1] else []
    return wrong + lost(seen or {}, sweep.lines()) + compare(whole, sweep.out)


def _moment(sweep: Sweep, draw: random.Random) -> None:
    """Wait for a random moment: mostly shortly after some more examples are done, else wherever the clients are."""
    if draw.random() < 0.3:
        time.sleep(draw.expovariate(0.5))
        return
    wanted = sum(map(len, sweep.lines().values())) + draw.randint(1, 5)
    until = time.monotonic() + 30
    while sum(map(len, sweep.lines().values())) < wanted and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(draw.uniform(0, 0.3))


def _complete(sweep: Sweep) -> bool:
    lines = sweep.lines()
    return len(lines) == len(CELLS) and all(len(cell) == EXAMPLES for cell in lines.values())


def disk(asked: Asked, whole: Path) -> tuple[str, list[str]]:
    """From the first sample on no file can grow beyond 6,000 bytes, as on a full disk; then it can again."""
    sweep = asked.sweep("disk")
    code = sweep.run(before=FULL.format(samples=str(sweep.out / "*" / SAMPLES)))
    seen, said = sweep.lines(), sweep.said()
    wrong = expected(sweep, code, 1) + ([] if "no space left to write results" in said else ["the disk is not named"])
    wrong += finished(sweep, whole, seen)
    return f"a full disk after {sum(map(len, seen.values()))} samples", wrong


def folder(asked: Asked, whole: Path) -> tuple[str, list[str]]:
    """A file stands where a cell's folder should be: the other cells go on."""
    sweep = asked.sweep("folder")
    sweep.out.mkdir()
    taken = sweep.out / sorted(path.parent.name for path in whole.glob(f"*/{SAMPLES}"))[0]
    taken.write_text("a file of somebody else's", encoding="utf-8")
    wrong = expected(sweep, sweep.run(), 1)
    wrong += [] if len(sweep.lines()) == len(CELLS) - 1 else ["the other cells did not go on"]
    taken.unlink()
    return "a file where a cell's folder should be", wrong + finished(sweep, whole)


def line(asked: Asked, whole: Path) -> tuple[str, list[str]]:
    """Last lines that were cut off are computed again; a damaged line before the last is named, and nothing changed."""
    draw, sweep = random.Random(asked.seed), asked.sweep("line")
    shutil.copytree(whole, sweep.out)
    paths = sorted(sweep.out.glob(f"*/{SAMPLES}"))
    for path in paths[1:]:
        last = path.read_bytes().splitlines(keepends=True)[-1]
        os.truncate(path, path.stat().st_size - draw.randrange(1, len(last)))
        if draw.random() < 0.5:
            with path.open("ab") as stream:
                stream.write(bytes(draw.randrange(256) for _ in range(40)).replace(b"\n", b""))
    lines = paths[0].read_bytes().splitlines(keepends=True)
    damaged = b"".join([*lines[:3], lines[3][:20] + b"\n", *lines[4:]])
    paths[0].write_bytes(damaged)
    wrong = expected(sweep, sweep.run(), 2)
    wrong += [] if f"{paths[0]}, line 4: " in sweep.said() else ["the damaged line is not named"]
    wrong += [] if paths[0].read_bytes() == damaged else ["the damaged file was changed"]
    paths[0].write_bytes(b"".join(lines))
    return f"{len(paths) - 1} last lines cut off, one damaged before", wrong + finished(sweep, whole)


def clock(asked: Asked, whole: Path) -> tuple[str, list[str]]:
    """Two clients at once, a day apart, whose clocks jump forwards and backwards."""
    sweep = asked.sweep("clock")
    clients = []
    for number in range(2):
        place = asked.folder / f"clock-{number}"
        place.mkdir()
        (place / "sitecustomize.py").write_text(CLOCK.format(seed=asked.seed + number, days=number), encoding="utf-8")
        clients.append(sweep.start(PYTHONPATH=os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")])))
    for client in clients:
        client.wait()
    sweep.wait()
    wrong = [] if "Traceback" not in sweep.said() else ["there is a traceback"]
    return "two clients a day apart, with clocks that jump", wrong + finished(sweep, whole, sweep.lines())


FAULTS: dict[str, Callable[[Asked, Path], tuple[str, list[str]]]] = {
    fault.__name__: fault for fault in (kills, disk, folder, line, clock)
}


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    own, extra = list(arguments), list[str]()
    if "--" in own:
        own, extra = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=f"some of {', '.join(FAULTS)} (all)")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--clients", type=int, default=2, help="that compute the same sweep at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where sweeps and logs go (default: one below /tmp, then deleted)")
    given = parser.parse_args(own)
    if unknown := set(given.faults) - set(FAULTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose some of {', '.join(FAULTS)}")
    place = (given.folder or Path(tempfile.mkdtemp(prefix="kvbench-faults-"))).resolve()
    place.mkdir(parents=True, exist_ok=True)
    asked = Asked(given.kills, given.clients, given.seed, place, tuple(extra))
    here = tuple(field for field in extra if not field.startswith("launcher"))
    whole = Sweep(place / "whole", here)  # in one process, whatever computes the others
    code = whole.run()
    assert code == 0, f"the undisturbed sweep ends with {code}, see {whole.log}"
    assert _complete(whole), f"the undisturbed sweep has not {len(CELLS)} cells of {EXAMPLES} examples, see {whole.log}"
    failed = [name for name in given.faults or FAULTS if not _report(name, asked, whole.out)]
    if given.folder is None and not failed:
        shutil.rmtree(place)
    return 1 if failed else 0


def _report(name: str, asked: Asked, whole: Path) -> bool:
    begun = time.monotonic()
    what, wrong = FAULTS[name](asked, whole)
    print(f"{name}: {what}: {'equal' if not wrong else f'{len(wrong)} differences'}, {time.monotonic() - begun:.0f} s")
    for sentence in wrong[:20]:
        print(f"  {sentence}")
    return not wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
