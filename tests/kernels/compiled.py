"""Kernels compiled for GPUs that are not there, as their launchers would ask for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton has wheels for Linux only")
compiler = pytest.importorskip("triton.backends.compiler")

POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
REGISTERS = "ptxas_regs"


def compiled(
    kernel: Any,
    dtype: torch.dtype,
    constants: dict[str, Any],
    capability: int,
    inputs: Iterable[str] = ("q_ptr", "k_ptr"),
    positions: Iterable[str] = ("q_pos_ptr", "k_pos_ptr"),
    odd: bool = False,
) -> Any:
    """The kernel for `inputs` of a dtype: strides of 1 between numbers and of 16 else, or (odd) any strides at all."""
    if not isinstance(kernel, triton.runtime.JITFunction):
        pytest.skip("TRITON_INTERPRET is set: nothing is compiled")
    constants = dict(constants)
    options = {option: constants.pop(option) for option in ("num_warps", "num_stages")}
    if not odd:
        constants.update({name: 1 for name in kernel.arg_names if name.endswith("_dim")})
    types = {name: "constexpr" if name in constants else "i32" for name in kernel.arg_names}
    types.update({name: "*fp32" for name in types if name.endswith("_ptr")})
    types.update({name: "fp32" for name in ("scale", "cap", "eps") if name in types})
    types.update(dict.fromkeys(inputs, POINTERS[dtype]))
    types.update({name: "*i64" for name in positions if name in types})
    strides = [name for name in types if types[name][0] == "*" or name.endswith(("_batch", "_head", "_row"))]
    places = [i for i, name in enumerate(types) if name in strides and not odd]
    source = triton.compiler.ASTSource(kernel, types, constants, {(i,): [["tt.divisibility", 16]] for i in places})
    return triton.compile(source, target=compiler.GPUTarget("cuda", capability, 32), options=options)


def spills(binary: Any) -> int:
    """Bytes of registers a thread keeps in memory instead, as the assembler's listing of the kernel says."""
    import re
    import subprocess
    import tempfile

    from triton.backends.nvidia.compiler import get_ptxas

    arch = re.search(r"^\.target (\S+?)(?:,|$)", binary.asm["ptx"], re.M)
    assert arch is not None
    name = arch[1]
    ptxas = get_ptxas(int(re.sub(r"\D", "", name)))
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(binary.asm["ptx"])
        file.flush()
        command = [str(getattr(ptxas, "path", ptxas)), "-v", f"-arch={name}", "-o", "/dev/null", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"(\d+) bytes spill stores", done.stderr)
    assert found is not None, done.stderr
    return int(found[1])
