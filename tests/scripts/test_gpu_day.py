"""The day with a GPU, as far as it runs without one: its pieces start, stop in time and leave what goes on."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvbench.tools.bench.bench import Bench
from kvbench.tools.bench.kernels import found_cases
from kvbench.tools.bench.settings import ABOUT, check_used, parse

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]
BASH = shutil.which("bash")
pytestmark = pytest.mark.skipif(BASH is None, reason="bash is not installed")


def gpu_day(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    assert BASH is not None
    return subprocess.run(
        [BASH, "scripts/gpu_day.sh", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def piece(name: str, tmp_path: Path, **environment: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    """A piece of two minutes, and the folder of what comes back from it."""
    out, place = tmp_path / "out", tmp_path / "place"
    place.mkdir()
    return gpu_day(name, OUT=str(out), TMPDIR=str(place), LIMIT="120", **environment), out


def commands(*arguments: str) -> list[list[str]]:
    """What a dry run would start, without what is done, and the files of its first test piece."""
    done = gpu_day(*arguments, DRY="1")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if ", at most " in line]
    return [shlex.split(line.partition(" s: ")[2]) for line in lines]


def test_a_dry_run_starts_what_exists_in_the_order_of_worth() -> None:
    planned = commands("next")
    tests, *rest = planned
    files = [word for word in tests if word.startswith("tests/")]
    assert {Path(file).stem for file in files} >= {"test_selection", "test_compaction", "test_quantised_attention"}
    assert all((ROOT / file).exists() for file in [*files, *planned[-1]] if file.startswith("tests/"))
    assert [command[2] for command in rest[:2]] == ["memcheck", "racecheck"]
    asked = [command[command.index("kvbench.bench") + 1 :] for command in rest[:-1]]
    names = [words[0] for words in asked]
    assert names[:6] == ["kernels", "kernels", "steps", "kernels", "sweep", "targets"]
    assert set(names) == set(ABOUT)
    for name, *words in asked:
        settings = parse(words)
        check_used(name, settings)
        for word in settings.only or ():
            assert list(found_cases(Bench(replace(settings, only=[word]), CPU, ""))), word


def test_a_red_piece_is_not_done_and_comes_again_after_the_others(tmp_path: Path) -> None:
    """A stand-in for Python fails `steps` once; everything else it is asked for is well."""
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\necho "$*" >>"$LOG"\n[ "$1" = -c ] && { echo "Test GPU"; exit 0; }\n'
        'case "$*" in *kvbench.bench\\ steps*) [ -e "$LOG.once" ] || { touch "$LOG.once"; exit 1; };; esac\n'
    )
    python.chmod(0o700)
    (tmp_path / "compute-sanitizer").symlink_to("/bin/true")
    place = {"PYTHON": str(python), "LOG": str(tmp_path / "log"), "OUT": str(tmp_path / "out"), "TMPDIR": str(tmp_path)}
    path = f"{tmp_path}:{os.environ['PATH']}"

    def ran() -> list[str]:
        gpu_day("next", **place, PATH=path)
        lines = (tmp_path / "log").read_text().splitlines()
        (tmp_path / "log").unlink()
        return [line.split()[2] for line in lines if line.startswith("-m kvbench.bench")]

    first = ran()
    assert (first.index("steps"), first.count("steps"), first[-1]) == (0, 2, "steps")
    assert ran() == [], "all are done with this code"
