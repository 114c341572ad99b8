"""Kernels compiled for GPUs that are not there, as their launchers would ask for them."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kvbench.kernels.jit import Strides

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
OPTIONS = ("num_warps", "num_stages", "maxnreg")
REAL = ("scale", "cap", "eps", "floor", "beta", "near")
STRIDES = ("_batch", "_head", "_row", "_token", "_entry", "_slot")


MADE: list[tuple[object, ...]] = []  # of every kernel compiled: see HEADER
HEADER = ("kernel", "test", "sm", "registers", "spilled", "shared", "warps", "seconds")


@dataclass(frozen=True)
class Compiled:
    """Listings of a kernel, bytes of shared memory of a block, a thread's registers and the bytes that it spills."""

    ttgir: str
    ptx: str
    shared: int
    registers: int
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
    if not isinstance(kernel, triton.runtime.JITFunction):
        pytest.skip("TRITON_INTERPRET is set: nothing is compiled")
    names, given = list(kernel.arg_names), dict(pointers or {})
    constants = {name: value for name, value in how.items() if name not in OPTIONS}
    constants |= {name: None for name, dtype in given.items() if dtype is None and name in names}
    if not odd:
        constants = {name: 1 for name in names if name.endswith("_dim")} | constants
    types: dict[str, Any] = {name: "constexpr" if name in constants else _type(name, given) for name in names}
    places: dict[Any, Any] = dict(constants)
    whole: list[tuple[int, ...]] = []
    for place, name in enumerate(names):
        if name.endswith("_strides"):
            types[name] = Strides("i32", "i32", "i32", "i32" if odd else "constexpr")  # type: ignore[arg-type]
            whole += [] if odd else [(place, field) for field in range(3)]
            places |= {} if odd else {(place, 3): 1}
        elif types[name][0] == "*" or (types[name] == "i32" and not odd and name.endswith(STRIDES)):
            whole.append((place,))
    options = {name: how[name] for name in OPTIONS if name in how}
    return build(kernel, types, places, whole, options, capability)


def build(
    kernel: Any,
    types: dict[str, Any],
    constants: dict[Any, Any],
    whole: list[tuple[int, ...]],
    options: dict[str, int],
    capability: int,
) -> Compiled:
    """A kernel of these argument types for sm_<capability>; whole: places of multiples of 16.

    A place is a path: that of an argument, then of a field where the argument is a tuple.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    known = {place: [["tt.divisibility", 16]] for place in whole}
    source = triton.compiler.ASTSource(kernel, types, constants, known)
    began = time.monotonic()
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert f"sm_{capability}" in made.asm["ptx"]
    registers, spilled = _usage(made.asm["cubin"])
    shared, warps, seconds = made.metadata.shared, made.metadata.num_warps, time.monotonic() - began
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition("::")[2].removesuffix(" (call)")
    MADE.append((kernel.__name__, test, capability, registers, spilled, shared, warps, f"{seconds:.1f}"))
    return Compiled(made.asm["ttgir"], made.asm["ptx"], shared, registers, spilled)


def table() -> str:
    """What was compiled in this process, a kernel a line."""
    lines = [tuple(map(str, line)) for line in (HEADER, *MADE)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(x.ljust(n) for x, n in zip(line, widths, strict=True)).rstrip() for line in lines)


def _type(name: str, pointers: Mapping[str, torch.dtype | None]) -> str:
    if name.endswith("_ptr"):
        return POINTERS[pointers.get(name) or torch.float32]
    return "fp32" if name in REAL else "i32"


def _usage(cubin: bytes) -> tuple[int, int]:
    """A thread's registers, and its bytes of local memory: what does not fit them."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    registers, stack = (max(map(int, re.findall(rf"{what}:(\d+)", done.stdout))) for what in ("REG", "STACK"))
    return registers, stack


def prompt_pointers(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """What the kernels over a prompt or a window are handed: queries, keys, values and output in a dtype, positions."""
    positions = dict.fromkeys(("q_pos_ptr", "k_pos_ptr"), torch.int64)
    return dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), dtype) | positions
