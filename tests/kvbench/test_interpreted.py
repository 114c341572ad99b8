"""Whole policies with their decoding steps in the kernels, interpreted: they keep and say what PyTorch's path does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

NUMPY_AND_OLD_TRITON = "only 0-dimensional arrays can be converted to Python scalars"
SUPPORT = Path(__file__).parents[1] / "support"


def same_with_kernels(*cases: str) -> None:
    """Each case is slug:family:sequences of the batch."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("run_interpreted.py")), *cases],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SUPPORT)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    if NUMPY_AND_OLD_TRITON in done.stderr:
        pytest.skip("the interpreter of this Triton cannot loop with this numpy")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("launches") == len(cases)


def test_h2o_keeps_the_same_tokens_with_its_weights_out_of_the_kernel() -> None:
    same_with_kernels("h2o:llama:1")


@pytest.mark.slow
def test_policies_that_read_the_newest_row_keep_the_same_tokens() -> None:
    slugs = ("tova", "roco", "cake", "d2o", "caote_tova", "caote_h2o", "fastcaote_h2o", "h2o_norecent", "p2a_h2o")
    same_with_kernels(*(f"{slug}:llama:2" for slug in slugs))


@pytest.mark.slow
def test_other_stores_and_policies_attend_through_the_kernel_alike() -> None:
    same_with_kernels(
        "full:llama:2", "snapkv:llama:1", "ada_snapkv:llama:2", "ada_pyramidkv:qwen2:1", "streamingllm:llama:2"
    )


@pytest.mark.slow
def test_soft_caps_and_sliding_windows_go_through_the_kernel() -> None:
    same_with_kernels("h2o:gemma2:2", "tova:gemma2:1", "roco:mistral:2", "full:gemma2:2", "ada_snapkv:gemma2:1")
