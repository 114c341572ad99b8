"""Kill a sweep's processes at random and compare what is left with an uninterrupted sweep's files.

    python scripts/kill_sweep.py --kills 100

12 cells of 20 examples on the pocket model (or --model), two workers. Every few seconds one process, the client or a
worker, is killed with -9; whoever is missing is started again. At the end every file must equal that of the sweep that
nobody touched, but for seconds, and no line that was ever on disk may have changed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SECONDS = {"prefill_seconds", "decode_seconds", "decode_ms_per_token"}
CELLS = ("policy=snapkv,tova,knorm,streamingllm,h2o,caote_snapkv", "budget=64,128", "task=niah")
SMALL = ("limit=20", "task.lengths=[512]", "task.repeats=20", "task.depths=[0.5]")


def start(out: Path, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "kvbench", "-m", *CELLS, *SMALL, f"out={out}", *more]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)


def lines(out: Path) -> dict[str, list[bytes]]:
    """Whole lines of all samples."""
    return {
        path.parent.name: [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        for path in out.glob("*/samples.jsonl")
    }


def owners(out: Path) -> list[int]:
    """Processes that own a cell."""
    found = set()
    for path in out.glob("*/.claim-*"):
        try:
            found.add(int(json.loads(path.read_bytes()[13:])["pid"]))
        except (OSError, ValueError, KeyError):
            continue
    return sorted(found)


def plain(value: Any) -> Any:  # noqa: ANN401 - whatever JSON holds
    """JSON without seconds, wherever they stand."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items() if k not in SECONDS}
    return [plain(v) for v in value] if isinstance(value, list) else value


def files(out: Path) -> dict[str, Any]:
    """Everything the runs left, comparable."""
    found: dict[str, Any] = {}
    for path in sorted(out.glob("*/*")):
        name = str(path.relative_to(out))
        if path.name == "samples.jsonl":
            found[name] = [plain(json.loads(line)) for line in path.read_text().splitlines()]
        elif path.suffix == ".json" and not name.startswith("."):
            found[name] = plain(json.loads(path.read_text()))
        elif path.suffix == ".yaml" and path.parent != out:
            found[name] = path.read_text().replace(str(out), "OUT")
    return {name: value for name, value in found.items() if not name.startswith(".sweep")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("/tmp/kvbench-kills"))
    asked = parser.parse_args()
    draw = random.Random(asked.seed)
    whole, torn = asked.out / "whole", asked.out / "torn"
    start(whole).wait()
    killed = {"client": 0, "worker": 0}
    lost = 0
    seen: dict[str, list[bytes]] = {}
    client = start(torn, "launcher.workers=2")
    while sum(killed.values()) < asked.kills:
        time.sleep(draw.uniform(0.2, 5.0))
        now = lines(torn)
        lost += sum(now.get(name, [])[: len(before)] != before for name, before in seen.items())
        seen = now
        if client.poll() is not None:
            if sum(map(len, now.values())) >= sum(map(len, lines(whole).values())):
                print(f"the sweep was complete after {sum(killed.values())} kills: its samples are cut to go on")
                for path in torn.glob("*/samples.jsonl"):
                    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[: draw.randrange(20)]))
                    (path.parent / "metrics.json").unlink(missing_ok=True)
                seen = lines(torn)
            client = start(torn, "launcher.workers=2")
            continue
        working = owners(torn)
        if not working and draw.random() < 0.98:  # mostly once it computes, sometimes while it starts
            continue
        if working and draw.random() < 0.6:
            kind, pid = "worker", draw.choice(working)
        else:
            kind, pid = "client", client.pid
        try:
            os.kill(pid, signal.SIGKILL)
            killed[kind] += 1
        except ProcessLookupError:
            continue
    client.wait() if client.poll() is None else None
    last = start(torn)
    last.wait()
    same = files(whole) == files(torn)
    print(f"killed {killed['client']} clients and {killed['worker']} workers; lines lost or changed: {lost}; ", end="")
    print("every file equals the uninterrupted sweep's but for seconds" if same else "FILES DIFFER")
    return 0 if same and not lost else 1


if __name__ == "__main__":
    sys.exit(main())
