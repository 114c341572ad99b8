"""The day with a GPU, as far as it runs without one: its pieces start, stop in time and leave what goes on."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
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
    for word in (word for word in rest[0] if "::" in word):
        file, _, name = word.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(), word
    rest = rest[2:]
    asked = [command[command.index("kvbench.bench") + 1 :] for command in rest[:-1]]
    names = [words[0] for words in asked]
    assert names[:4] == ["steps", "kernels", "sweep", "targets"]
    assert set(names) == set(ABOUT)
    for name, *words in asked:
        settings = parse(words)
        check_used(name, settings)
        for word in settings.only or ():
            assert list(found_cases(Bench(replace(settings, only=[word]), CPU, ""))), word


@pytest.fixture
def asked(tmp_path: Path) -> Callable[..., tuple[int, list[str]]]:
    """Exit code and benchmarks of one command, where a stand-in for Python is well at once but for `steps`.

    Its processes end with `codes`, one after the other. gone: seconds of the command that have passed.
    """
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\necho "$*" >>"$LOG"\n[ "$1" = -c ] && { echo "Test GPU"; exit 0; }\n'
        'case "$*" in *kvbench.bench\\ steps*) read -r code <"$ENDS"; sed -i 1d "$ENDS"; exit "${code:-0}";; esac\n'
    )
    python.chmod(0o700)
    (tmp_path / "compute-sanitizer").symlink_to("/bin/true")
    log, ends = tmp_path / "log", tmp_path / "ends"
    place = {"PYTHON": str(python), "LOG": str(log), "ENDS": str(ends), "OUT": str(tmp_path / "out")}

    def command(*codes: int, gone: int = 0) -> tuple[int, list[str]]:
        ends.write_text("".join(f"{code}\n" for code in codes))
        path = f"{tmp_path}:{os.environ['PATH']}"
        done = gpu_day("next", **place, PATH=path, TMPDIR=str(tmp_path), SECONDS=str(gone))
        lines = log.read_text().splitlines()
        log.unlink()
        return done.returncode, [line.split()[2] for line in lines if line.startswith("-m kvbench.bench")]

    return command


def test_a_red_piece_is_not_done_and_comes_again_after_the_others(asked: Callable[..., tuple[int, list[str]]]) -> None:
    code, first = asked(1)
    assert (code, first.index("steps"), first.count("steps"), first[-1]) == (0, 0, 2, "steps")
    assert asked() == (0, []), "all are done with this code"


def test_a_piece_that_ran_out_of_time_is_red_only_the_second_time(asked: Callable[..., tuple[int, list[str]]]) -> None:
    assert asked(124, gone=260) == (75, ["steps", "kernels"])
    code, again = asked(124)
    assert (code, again[:2], again.count("steps"), again[-1]) == (0, ["steps", "sweep"], 2, "steps")


def test_a_round_that_would_not_fit_is_left_to_the_next_command(asked: Callable[..., tuple[int, list[str]]]) -> None:
    code, first = asked(gone=260)
    assert (code, first) == (75, ["steps", "kernels"])
    code, first = asked()
    assert (code, first[:2]) == (0, ["sweep", "targets"])
