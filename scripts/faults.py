"""What a sweep survives: kills, a full disk, a folder that cannot be written, a damaged line, a clock that jumps.

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
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fault_sweep import CELLS, EXAMPLES, FILES, Sweep, compare, lost, place_for

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
        sweep, seen = asked.sweep(f"kills-{rounds}"), dict[str, list[bytes]]()
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
        code = sweep.finish()
        wrong += [
            f"round {rounds}: {sentence}" for sentence in (*lost(seen, sweep.lines()), *compare(whole, sweep.out))
        ]
        wrong += [f"round {rounds}: the last command ends with {code}, see {sweep.log}"] if code else []
        rounds += 1
    return f"{done} kill -9 ({victims['clients']} clients, {victims['workers']} others) in {rounds} sweeps", wrong


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
    """The disk is full in the middle of the sweep, then there is room again."""
    sweep = asked.sweep("disk")
    sweep.out.mkdir()
    mounted = _mount(sweep.out, "size=120k")
    limit = "" if mounted else "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))"
    try:
        code, seen = sweep.run(before=limit), sweep.lines()
        wrong = [] if code == 1 else [f"a full disk ends with {code}, not 1"]
        wrong += [] if "no space left to write results" in sweep.said() else ["the full disk is not said"]
        wrong += [] if "Traceback" not in sweep.said() else ["there is a traceback"]
        if mounted:
            _mount(sweep.out, "remount,size=64m")
        code = sweep.finish()
        wrong += [f"with room again it ends with {code}"] if code else []
        kept = sum(map(len, seen.values()))
        return f"a full disk after {kept} samples", wrong + lost(seen, sweep.lines()) + compare(whole, sweep.out)
    finally:
        sweep.kill_all()
        if mounted:
            subprocess.run(["umount", str(sweep.out)], check=True)


def folder(asked: Asked, whole: Path) -> tuple[str, list[str]]:
    """The folder cannot be written to; then it can, but a file stands where a cell's folder should be."""
    sweep, wrong = asked.sweep("folder"), list[str]()
    sweep.out.mkdir()
    mounted = _mount(sweep.out, "size=64m") and _mount(sweep.out, "remount,ro")
    if not mounted:
        sweep.out.chmod(0o500)
    try:
        code = sweep.run()
        wrong += [] if code == 2 else [f"a folder that cannot be written ends with {code}, not 2"]
        wrong += [] if "cannot be written to" in sweep.said() else ["the folder is not named"]
    finally:
        sweep.kill_all()
        if mounted:
            subprocess.run(["umount", str(sweep.out)], check=True)
    sweep.out.chmod(0o700)
    taken = sweep.out / sorted(path.parent.name for path in whole.glob(f"*/{FILES[0]}"))[0]
    taken.write_text("a file of somebody else's", encoding="utf-8")
    code = sweep.run()
    wrong += [] if code else ["a cell without a folder is no failure"]
    wrong += [] if len(sweep.lines()) == len(CELLS) - 1 else ["the other cells did not go on"]
    wrong += [] if "Traceback" not in sweep.said() else ["there is a traceback"]
    taken.unlink()
    code = sweep.finish()
    wrong += [f"with all folders it ends with {code}"] if code else []
    return "a folder that cannot be written to, and one cell's", wrong + compare(whole, sweep.out)


def line(asked: Asked, whole: Path) -> tuple[str, list[str]]:
    """Last lines that were cut off are computed again; a damaged line before the last is named, and nothing changed."""
    draw, sweep, wrong = random.Random(asked.seed), asked.sweep("line"), list[str]()
    shutil.copytree(whole, sweep.out)
    paths = sorted(sweep.out.glob(f"*/{FILES[0]}"))
    for path in paths[1:]:
        last = path.read_bytes().splitlines(keepends=True)[-1]
        os.truncate(path, path.stat().st_size - draw.randrange(1, len(last)))
        if draw.random() < 0.5:
            with path.open("ab") as stream:
                stream.write(bytes(draw.randrange(256) for _ in range(40)).replace(b"\n", b""))
    lines = paths[0].read_bytes().splitlines(keepends=True)
    damaged = b"".join([*lines[:3], lines[3][:20] + b"\n", *lines[4:]])
    paths[0].write_bytes(damaged)
    code = sweep.run()
    wrong += [] if code == 2 else [f"a damaged line ends with {code}, not 2"]
    wrong += [] if f"{paths[0]}, line 4: " in sweep.said() else ["the damaged line is not named"]
    wrong += [] if paths[0].read_bytes() == damaged else ["the damaged file was changed"]
    paths[0].write_bytes(b"".join(lines))
    code = sweep.finish()
    wrong += [f"with the line restored it ends with {code}"] if code else []
    return f"{len(paths) - 1} last lines cut off, one damaged before", wrong + compare(whole, sweep.out)


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
    seen = sweep.lines()
    code = sweep.finish()
    wrong = [f"it ends with {code}"] if code else []
    wrong += [] if "Traceback" not in sweep.said() else ["there is a traceback"]
    return "two clients a day apart, with clocks that jump", wrong + lost(seen, sweep.lines()) + compare(
        whole, sweep.out
    )


def _mount(place: Path, options: str) -> bool:
    """A small disk of memory at `place`, or other options for it; False where this user may not mount."""
    command = ["mount", "-t", "tmpfs", "-o", options, "none", str(place)]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


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
    place = (given.folder or place_for("runs")).resolve()
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
