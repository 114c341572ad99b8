"""Compiles and runs C++ that a model wrote, with the official limits. It runs on this machine: use a container."""

from __future__ import annotations

import re
import resource
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kvbench.tasks.longproc.scores import Metrics, accuracy

LIBRARIES = (
    *("cstdio", "iostream", "vector", "algorithm", "numeric", "cmath", "cstring", "set", "map", "queue", "stack"),
    *("list", "fstream", "climits", "cassert", "iomanip", "sstream", "bitset"),
)
TESTS, SECONDS, MEMORY, WRITTEN = 10, 3, 2**30, 2**20

Test = Sequence[Sequence[str]]
"""Lines of the input, and of the expected output."""


def pseudo_to_code(output: str, tests: Sequence[Test]) -> Metrics:
    """1 if the program in the answer's fence compiles and prints the expected words in the first 10 tests."""
    fenced = re.search(r"```cpp([\s\S]*)```", output.replace("```c++", "```cpp"))
    if fenced is None:
        return accuracy(False, 0.0, False)
    with tempfile.TemporaryDirectory(prefix="kvbench-") as folder:
        right = _passes(fenced[1], tests[:TESTS], Path(folder))
    return accuracy(right, float(right), True)


def _passes(code: str, tests: Sequence[Test], folder: Path) -> bool:
    includes = "".join(f"#include <{name}>\n" for name in LIBRARIES)
    (folder / "main.cpp").write_text(f"{includes}using namespace std;\n{code}", encoding="utf-8")
    if _run(["g++", "-std=c++11", "main.cpp", "-o", "main"], folder, "", 60) is None:
        return False
    for given, expected in tests:
        found = _run([str(folder / "main")], folder, "\n".join(given), SECONDS, limited=True)
        if found is None or found.split() != "\n".join(expected).split():
            return False
    return True


def _run(command: list[str], folder: Path, text: str, seconds: int, limited: bool = False) -> str | None:
    """The output of a process; None if it fails, or takes too long. limited: in memory, CPU time and file size."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            input=text,
            capture_output=True,
            timeout=seconds,
            text=True,
            errors="replace",
            check=False,
            env={"PATH": "/usr/local/bin:/usr/bin:/bin"},
            preexec_fn=_limit if limited else None,
        )
    except subprocess.TimeoutExpired:
        return None
    return done.stdout if done.returncode == 0 else None


def _limit() -> None:
    for kind, most in (
        (resource.RLIMIT_CPU, SECONDS),
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_FSIZE, WRITTEN),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))
