"""How the kernels of an eviction are tested without a GPU: interpreted in another process, compiled for GPUs not there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

INTERPRET = Path(__file__).parents[1] / "kernels" / "interpret_eviction.py"
NUMPY_AND_OLD_TRITON = "only 0-dimensional arrays can be converted to Python scalars"
KIND = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}

Calls = dict[str, tuple[str, str, dict[str, Any]]]


def interpreted(calls: Calls, folder: Path) -> dict[str, Any]:
    """What each call (module of kvbench.kernels, function, arguments) gives where Triton interprets."""
    torch.save(calls, folder / "calls.pt")
    done = subprocess.run(
        [sys.executable, str(INTERPRET), folder / "calls.pt", folder / "results.pt"],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if NUMPY_AND_OLD_TRITON in done.stderr:
        pytest.skip("the interpreter of this Triton cannot loop with this numpy")
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = torch.load(folder / "results.pt", weights_only=False)
    return results


def compiled(
    kernel: Any, pointers: dict[str, str], constants: dict[str, Any], capability: int, odd: bool = False, **how: Any
) -> tuple[Any, int]:
    """The kernel for sm_<capability>, and the bytes its registers spill to memory.

    pointers: what `*_ptr` arguments point to, float32 where not named. odd: no stride is known to be a multiple of 16.
    """
    triton = pytest.importorskip("triton", reason="Triton has wheels for Linux only")
    compiler = pytest.importorskip("triton.backends.compiler")
    if not isinstance(kernel, triton.runtime.JITFunction):
        pytest.skip("TRITON_INTERPRET is set: nothing is compiled")
    types = {name: "constexpr" if name in constants else "i32" for name in kernel.arg_names}
    types |= {name: "*fp32" for name in types if name.endswith("_ptr")} | pointers
    types |= dict.fromkeys({"eps", "floor", "beta"} & set(types), "fp32")
    aligned = [i for i, kind in enumerate(types.values()) if kind[0] == "*" or (kind == "i32" and not odd)]
    attributes = {(place,): [["tt.divisibility", 16]] for place in aligned}
    source = triton.compiler.ASTSource(kernel, types, constants, attributes)
    made = triton.compile(source, target=compiler.GPUTarget("cuda", capability, 32), options=how)
    return made, _spilled(made, capability)


def _spilled(made: Any, capability: int) -> int:
    """Bytes that threads store to memory for want of registers, from the assembler's own report."""
    from triton import knobs  # noqa: PLC0415 - only where Triton is there

    assembler = knobs.nvidia.ptxas_blackwell.path if capability >= 100 else knobs.nvidia.ptxas.path
    target = f"sm_{capability}a" if capability >= 90 else f"sm_{capability}"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(made.asm["ptx"])
        file.flush()
        command = [assembler, "-v", f"--gpu-name={target}", file.name, "-o", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", done.stderr))
