"""Compiles and runs C++ that a model wrote, with the official limits, in a process namespace without network.

The kernel ends every process of the namespace with its first one, also those that a program detached. Files of this
machine can be read and written: use a container.
"""

from __future__ import annotations

import re
import resource
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from kvbench.errors import ConfigError
from kvbench.tasks.longproc.scores import Metrics, accuracy

LIBRARIES = (
    *("cstdio", "iostream", "vector", "algorithm", "numeric", "cmath", "cstring", "set", "map", "queue", "stack"),
    *("list", "fstream", "climits", "cassert", "iomanip", "sstream", "bitset"),
)
TESTS, SECONDS, MEMORY, WRITTEN = 10, 3, 2**30, 2**20
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
ISOLATED = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--net", "--mount-proc")
"""A user, process, network and mount namespace, by util-linux. Its processes see no others and end with `unshare`."""

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


@cache
def check_isolation() -> None:
    """Raise ConfigError unless this machine can end all processes of a program."""
    try:
        subprocess.run([*ISOLATED, "true"], env=ENVIRONMENT, check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or str(error).encode()
        why = (
            "is refused on this machine, because a program could outlive its time limit: it needs Linux with user "
            f"namespaces and util-linux's unshare ({reason.decode(errors='replace').strip()}); in Docker, "
            "--security-opt seccomp=unconfined --security-opt systempaths=unconfined permits them"
        )
        raise ConfigError("allow_code_execution", True, why=why) from error


def _run(command: list[str], folder: Path, text: str, seconds: int, limited: bool = False) -> str | None:
    """The output of a process; None if it fails, or takes too long. limited: in memory, CPU time and file size."""
    with tempfile.TemporaryFile() as output:  # a file has a limit, a pipe has none
        try:
            subprocess.run(
                [*ISOLATED, *command],
                cwd=folder,
                input=text.encode(),
                stdout=output,
                stderr=subprocess.DEVNULL,
                timeout=seconds,
                check=True,
                env=ENVIRONMENT,
                start_new_session=True,  # a signal to its own group reaches no other process
                preexec_fn=_limit if limited else None,
            )
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
            return None
        output.seek(0)
        return output.read().decode(errors="replace")


def _limit() -> None:
    for kind, most in (
        (resource.RLIMIT_CPU, SECONDS),
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_FSIZE, WRITTEN),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))
