"""The day with a GPU, as far as it runs without one: its pieces start, stop in time and leave what goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

from kvbench.tools.bench.about import ABOUT

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


def test_every_protocol_of_the_benchmark_is_a_piece_of_the_day() -> None:
    done = gpu_day("nothing")
    assert done.returncode == 2
    named = done.stderr.removeprefix("gpu_day.sh: 'nothing' is not one of ").strip().split(", ")
    assert set(named) == {*ABOUT, "next", "tests", "train"}


@pytest.mark.slow
def test_a_training_that_is_cut_short_comes_back_in_parts_that_make_a_checkpoint(tmp_path: Path) -> None:
    few = "--device cpu --minutes 9 --tokens 4352 --eval-limit 1"
    done, out = piece("train", tmp_path, TRAIN_ARGS=few)
    assert done.returncode == 75, done.stdout
    parts = sorted(out.glob("travelling.*"))
    assert all(part.stat().st_size <= 15 * 2**20 for part in parts)
    (tmp_path / "checkpoint.pt").write_bytes(b"".join(part.read_bytes() for part in parts))
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert state["at"]["step"] >= 1
    assert not (out / "pocket_larger").exists(), "there is no model before the training's end"


@pytest.mark.slow
def test_what_a_benchmark_measured_comes_back_packed(tmp_path: Path) -> None:
    little = "model=pocket scale=512 policies=tova rivals=none"
    done, out = piece("targets", tmp_path, ARGS=little)
    assert done.returncode == 0, done.stdout
    with tarfile.open(out / "efficiency.tar.gz") as packed:
        names = {Path(name).name for name in packed.getnames()}
    assert {"targets.json", "targets.csv", "targets.svg", "targets.jsonl", "targets.log"} <= names
