"""What a process records of itself: versions and hardware (`environment.json`), times and tokens (`engine.json`)."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench import __version__
from kvbench.errors import counted
from kvbench.results.files import read_json, write_json

PACKAGES = ("kvbench", "torch", "transformers", "tokenizers", "safetensors", "hydra-core", "numpy", "triton", "lm-eval")


def environment(device: Mapping[str, str | None]) -> dict[str, Any]:
    """The content of `environment.json`: this process, and the description of its device."""
    import torch  # imported here: it takes seconds, and commands that only read results do not need it

    memory = None
    with suppress(ValueError, OSError):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        **versions(),
        "hardware": {
            "platform": platform.platform(),
            "processor": _processor(),
            "cpus": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "memory_bytes": memory,
            **device,
        },
    }


def versions() -> dict[str, Any]:
    """Versions of Python, packages and kvbench's code."""
    found: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    found["kvbench"] = __version__
    revision = git_revision(Path(__file__).resolve().parent)
    return {"packages": found, "python": platform.python_version(), "kvbench_revision": revision}


def other_versions(before: Sequence[Mapping[str, Any]], now: Mapping[str, Any]) -> str:
    """The versions that differ between environments, as `torch 2.11 then, 2.13 now`; empty if none does.

    The revision of kvbench is not compared, because the code that computes is part of a run's identity; nor is lm-eval
    where it was not installed: then no task of it was run.
    """
    found = {}
    for earlier in before:
        then, here = ({**one["packages"], "python": one["python"]} for one in (earlier, now))
        for name in sorted(then.keys() | here.keys()):
            absent = name == "lm-eval" and None in (then.get(name), here.get(name))
            if then.get(name) != here.get(name) and not absent:
                found[name] = f"{name} {then.get(name)} then, {here.get(name)} now"
    return "; ".join(found.values())


def machine(environment: Mapping[str, Any], threads: bool = True) -> str:
    """The GPU or processor. threads: with the number of threads, on which times depend."""
    found = environment["hardware"]
    if found["device_name"]:
        return str(found["device_name"])
    count = found["torch_threads"]
    return f"{found['processor']}{f', {count} thread' + 's' * (count != 1) if threads else ''}"


def git_revision(folder: Path) -> str | None:
    """The commit of the checkout that tracks `folder`, with "+dirty" if tracked files differ; None without one.

    None for a package installed inside another checkout, such as a virtual environment there.
    """
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    revision = _git(folder, "rev-parse", "HEAD")
    dirty = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return f"{revision}+dirty" if revision and dirty else revision


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):  # git is not installed: the revision is unknown
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> str:
    """The name of the processor."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


ENGINE_FILE = "engine.json"

log = logging.getLogger(__name__)


@dataclass
class Totals:
    """Counts of one session. Seconds are wall time; a row is a sequence: one example under one policy."""

    rows: int = 0
    prefills: int = 0
    prompt_tokens: int = 0  # of the prefills; a shared prefill counts once
    prefill_seconds: float = 0.0
    steps: int = 0  # each decodes one token of all rows in flight
    decoded_tokens: int = 0  # sum of rows in flight over the steps
    decode_seconds: float = 0.0
    most_rows: int = 0

    def prefilled(self, prompt_tokens: int, rows: int, seconds: float) -> None:
        """Count one prefill of a prompt, which serves `rows` rows."""
        self.rows += rows
        self.prefills += 1
        self.prompt_tokens += prompt_tokens
        self.prefill_seconds += seconds

    def stepped(self, rows: int, seconds: float) -> None:
        """Count one decoding step of `rows` rows."""
        self.steps += 1
        self.decoded_tokens += rows
        self.decode_seconds += seconds
        self.most_rows = max(self.most_rows, rows)

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens of all rows per second; 0 before the first step."""
        return self.decoded_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def rows_per_step(self) -> float:
        """Mean number of rows per step; 0 before the first step."""
        return self.decoded_tokens / self.steps if self.steps else 0.0

    def __str__(self) -> str:
        return (
            f"{counted(self.prefills, 'prefill')} in {self.prefill_seconds:.1f} s, shared by "
            f"{counted(self.rows, 'sequence')}; {counted(self.steps, 'decoding step')} in {self.decode_seconds:.1f} s: "
            f"{self.rows_per_step:.1f} sequences a step, {self.tokens_per_second:.0f} tokens/s"
        )

    def described(self) -> dict[str, Any]:
        """All counts and means as plain data."""
        means = {"rows_per_step": self.rows_per_step, "tokens_per_second": self.tokens_per_second}
        return {name: round(value, 6) for name, value in {**vars(self), **means}.items()}


def record(places: Mapping[Path, str], totals: Totals) -> None:
    """Add a session to `engine.json` of every run that it computed."""
    session = {"runs": list(places.values()), **totals.described()}
    for place in places:
        _add(place / ENGINE_FILE, [session])


def _add(path: Path, sessions: Sequence[dict[str, Any]]) -> None:
    try:
        before = read_json(path)["sessions"] if path.exists() else []
        write_json(path, {"sessions": [*before, *(session for session in sessions if session not in before)]})
    except (OSError, ValueError, KeyError) as error:  # for example a full disk: the run itself is not affected
        log.warning("%s could not be written: %s", path, error)
