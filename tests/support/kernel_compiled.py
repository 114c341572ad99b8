"""Kernels compiled for GPUs that are not there, as their launchers would ask for them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Any

import torch

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


@dataclass(frozen=True)
class Compiled:
    """The listing of a kernel, bytes of shared memory of a block, a thread's registers and the bytes that it spills."""

    ptx: str
    shared: int
    registers: int
    spilled: int


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
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert f"sm_{capability}" in made.asm["ptx"]
    registers, spilled = _usage(made.asm["cubin"])
    return Compiled(made.asm["ptx"], made.metadata.shared, registers, spilled)


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
