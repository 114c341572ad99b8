"""Whole decodings with quantised stores whose kernels are interpreted: the same tokens as in PyTorch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton has wheels for Linux only")
PROGRAM = Path(__file__).parents[1] / "support" / "kv_decode_stores.py"


def decoded(folder: Path, interpret: str) -> dict[str, Any]:
    """What the program decodes in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder / interpret)],
        env={**os.environ, "TRITON_INTERPRET": interpret, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return torch.load(folder / interpret, weights_only=False)


@pytest.mark.slow
def test_kivi_ott_and_kcvc_decode_the_same_tokens_with_kernels_as_without(tmp_path: Path) -> None:
    plain, kernels = (decoded(tmp_path, interpret) for interpret in ("0", "1"))
    assert set(plain) == {"kivi", "kivi_whole", "ott", "kcvc"}
    for name, (tokens, keys, values, launches) in kernels.items():
        expected = plain[name]
        assert tokens == expected[0], name
        assert (launches > 0, expected[3]) == (True, 0), "the kernel was what attended"
        torch.testing.assert_close(keys, expected[1], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(values, expected[2], rtol=1e-3, atol=1e-3)
