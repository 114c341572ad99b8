"""Running a program nobody vouches for: on its own, for a few seconds, without network, files or other processes.

The walls are Linux namespaces and resource limits (see `sandbox_child`); where the kernel does not grant them nothing
is run. They keep out programs that go wrong, and most that mean harm; for code by an enemy use a virtual machine.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import comb
from pathlib import Path
from statistics import fmean

_CHILD = Path(__file__).with_name("sandbox_child.py")
_SAID_MOST = 4096  # bytes of a child's report that are read
_START = 20.0  # seconds a busy machine may take to start Python and to put the walls up


class SandboxUnavailableError(ValueError):
    """This machine does not grant what the walls are made of."""


@dataclass(frozen=True)
class Limits:
    """What a program may use. seconds of processor time; wall_seconds in all; bytes of memory; bytes of its files."""

    seconds: int = 3
    wall_seconds: float = 30.0  # on a busy machine a second of processor time takes several
    memory: int = 2**30
    files: int = 2**24


@dataclass(frozen=True)
class Verdict:
    """Whether a program ran to its end, and if not what stopped it, in a few words."""

    passed: bool
    reason: str = ""


def run_program(program: str, limits: Limits | None = None) -> Verdict:
    """Run a Python program and say whether its last statement was reached.

    It cannot end early and count as passed: only the end of the program tells the word that the parent waits for. (A
    program that searches the memory of its own process for that word could; one that solves nothing has no reason to.)
    Raises SandboxUnavailableError where it cannot be walled in, so that it was not run at all.
    """
    limits = limits or Limits()
    word = secrets.token_hex(16)
    order = json.dumps({"program": program, "word": word, "limits": asdict(limits)}).encode()
    reading, writing = os.pipe()
    with tempfile.TemporaryDirectory() as folder, os.fdopen(reading, "rb") as report:
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", str(_CHILD), str(writing), folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[writing],
                env={"OPENBLAS_NUM_THREADS": "1"},  # a thread per core would count as processes
                cwd=folder,
                start_new_session=True,
            )
        finally:
            os.close(writing)
        try:
            process.communicate(order, timeout=limits.wall_seconds + _START)
        except subprocess.TimeoutExpired:
            return Verdict(False, f"stopped after {limits.wall_seconds + _START:g} seconds")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said = report.read(_SAID_MOST).decode(errors="replace")
    if said.startswith("unavailable: "):
        raise SandboxUnavailableError(
            f"this machine does not let a program be walled in ({said.removeprefix('unavailable: ')}), so no code that "
            f"a model wrote is run: Linux with user namespaces (unshare) is needed"
        )
    return Verdict(True) if said == word else Verdict(False, said or "ended before its last statement")


class CodeEval:
    """What lm-eval calls `code_eval`, with the sandbox in place of the bare subprocess of that metric."""

    def compute(
        self, references: Sequence[str], predictions: Sequence[Sequence[str]], k: Sequence[int] = (1,)
    ) -> tuple[dict[str, float], dict[int, list[Verdict]]]:
        """pass@k of the predictions for each problem, and every verdict; references: the tests of each problem.

        Source: Chen et al. 2021, arXiv 2107.03374, eq. 1: 1 - C(n-c, k) / C(n, k), mean over the problems.
        """
        verdicts = {
            index: [run_program(f"{program}\n{test}") for program in programs]
            for index, (test, programs) in enumerate(zip(references, predictions, strict=True))
        }
        counts = [(len(found), sum(verdict.passed for verdict in found)) for found in verdicts.values()]
        least = min(n for n, _ in counts)
        sizes = [size for size in k if size <= least]
        means = {f"pass@{size}": fmean(1 - comb(n - c, size) / comb(n, size) for n, c in counts) for size in sizes}
        return means, verdicts
