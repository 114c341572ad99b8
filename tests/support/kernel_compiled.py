"""Kernels compiled for GPUs that are not there, as their launchers would ask for them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch

LITTLE = 99 * 1024  # bytes of shared memory that a block may ask for on sm_86 and sm_89, the least since 2020
POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}
OPTIONS = ("num_warps", "num_stages")
REAL = ("scale", "cap", "eps", "floor", "beta", "near")
STRIDES = ("_batch", "_head", "_row", "_token", "_entry", "_slot")


@dataclass(frozen=True)
class Compiled:
    """Listings of a kernel, bytes of shared memory that a block asks for, bytes of registers that a thread spills."""

    ttgir: str
    ptx: str
    shared: int
    spilled: int


def compiled(
    kernel: Any,
    capability: int,
    how: Mapping[str, Any],
    pointers: Mapping[str, torch.dtype | None] | None = None,
    odd: bool = False,
) -> Compiled:
    """A kernel for sm_<capability>; how: constants of the compilation and launch options, by name.

    pointers: what `*_ptr` arguments point to, float32 where not named; None: nothing is handed over. Strides are 1
    between the numbers of a row and multiples of 16 else, or (odd) anything.
    """
    triton = pytest.importorskip("triton", reason="Triton has wheels for Linux only")
    compiler = pytest.importorskip("triton.backends.compiler")
    if not isinstance(kernel, triton.runtime.JITFunction):
        pytest.skip("TRITON_INTERPRET is set: nothing is compiled")
    names, given = list(kernel.arg_names), dict(pointers or {})
    constants = {name: value for name, value in how.items() if name not in OPTIONS}
    constants |= {name: None for name, dtype in given.items() if dtype is None and name in names}
    if not odd:
        constants = {name: 1 for name in names if name.endswith("_dim")} | constants
    types = {name: "constexpr" if name in constants else _type(name, given) for name in names}
    whole = [
        place
        for place, name in enumerate(names)
        if types[name][0] == "*" or (types[name] == "i32" and not odd and name.endswith(STRIDES))
    ]
    source = triton.compiler.ASTSource(
        kernel, types, constants, {(place,): [["tt.divisibility", 16]] for place in whole}
    )
    options = {name: how[name] for name in OPTIONS if name in how}
    made = triton.compile(source, target=compiler.GPUTarget("cuda", capability, 32), options=options)
    assert f"sm_{capability}" in made.asm["ptx"]
    return Compiled(made.asm["ttgir"], made.asm["ptx"], made.metadata.shared, _stack(made.asm["cubin"]))


def _type(name: str, pointers: Mapping[str, torch.dtype | None]) -> str:
    if name.endswith("_ptr"):
        return POINTERS[pointers.get(name) or torch.float32]
    return "fp32" if name in REAL else "i32"


def _stack(cubin: bytes) -> int:
    """Bytes of local memory a thread needs: what does not fit its registers."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return max(int(n) for n in re.findall(r"STACK:(\d+)", done.stdout))


def prompt_pointers(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """What the kernels over a prompt or a window are handed: queries, keys, values and output in a dtype, positions."""
    positions = dict.fromkeys(("q_pos_ptr", "k_pos_ptr"), torch.int64)
    return dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), dtype) | positions
