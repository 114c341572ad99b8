"""Triton kernels interpreted on the CPU, in a process of its own: Triton reads TRITON_INTERPRET when it is imported."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

NUMPY_AND_OLD_TRITON = "only 0-dimensional arrays can be converted to Python scalars"
Call = tuple[str, str, dict[str, Any]]
"""A module of kvbench.kernels, a function in it, and its arguments by name."""


def interpreted(calls: dict[str, Call], folder: Path, timeout: int = 300) -> dict[str, Any]:
    """What each call returns (named tuples as tuples). Fresh memory is full of NaN: what is not written shows."""
    torch.save(calls, folder / "calls.pt")
    done = subprocess.run(
        [sys.executable, __file__, folder / "calls.pt", folder / "out.pt"],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if NUMPY_AND_OLD_TRITON in done.stderr:
        pytest.skip("the interpreter of this Triton cannot loop with this numpy")
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "out.pt")


def _run(source: str, target: str) -> None:
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with NaN
    torch.utils.deterministic.fill_uninitialized_memory = True
    out = {}
    for name, (module, function, arguments) in torch.load(source).items():
        found = getattr(importlib.import_module(f"kvbench.kernels.{module}"), function)(**arguments)
        out[name] = tuple(found) if isinstance(found, tuple) else found
    torch.save(out, target)


if __name__ == "__main__":
    _run(*sys.argv[1:])
