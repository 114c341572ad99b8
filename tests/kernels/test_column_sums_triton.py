"""The kernels of column_sums: interpreted on the CPU, compiled for GPUs that are not there, run on one that is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.kernels import column_sums as module
from kvbench.kernels.column_sums import column_sums, column_sums_ref, column_sums_triton, tiles

triton = pytest.importorskip("triton", reason="Triton has wheels for Linux only")
compiler = pytest.importorskip("triton.backends.compiler")

NUMPY_AND_OLD_TRITON = "only 0-dimensional arrays can be converted to Python scalars"
FLOAT32: dict[str, Any] = {
    "rtol": 1e-5,
    "atol": 1e-5,
}  # 16-bit inputs too: their products are exact in float32, where all is summed
POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}


@pytest.fixture(scope="module")
def interpreted(cases: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """What the kernels give for every case, from one process in which Triton interprets."""
    folder = tmp_path_factory.mktemp("interpreted")
    torch.save(cases, folder / "calls.pt")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("interpret.py")), folder / "calls.pt", folder / "sums.pt"],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if NUMPY_AND_OLD_TRITON in done.stderr:
        pytest.skip(f"the interpreter of Triton {triton.__version__} cannot loop with this numpy")
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "sums.pt")


def test_the_kernels_equal_the_reference(name: str, cases: dict[str, Any], interpreted: dict[str, Tensor]) -> None:
    assert interpreted[name].dtype == torch.float32
    torch.testing.assert_close(interpreted[name], column_sums_ref(**cases[name]), **FLOAT32)


def test_every_query_that_sees_a_slot_gives_one(
    name: str, cases: dict[str, Any], interpreted: dict[str, Tensor]
) -> None:
    call = cases[name]
    sums = interpreted[name].sum(-1)  # [B,H_kv,G]
    for sequence, positions in enumerate(call["query_positions"].tolist()):
        for head, stored in enumerate(call["key_positions"][sequence].tolist()):
            reach = call["sliding_window"] or 2**30
            giving = sum(any(0 <= slot <= at < slot + reach for slot in stored) for at in positions)
            expected = torch.full_like(sums[sequence, head], giving)
            torch.testing.assert_close(sums[sequence, head], expected, rtol=1e-5, atol=1e-5)


def signature(kernel: Any, dim: int, dtype: torch.dtype, odd: bool) -> Any:
    """What `column_sums_triton` would ask the compiler for: heads of `dim`; odd = soft-capped, sliding, any strides."""
    how = {"CAPPED": odd, "WINDOWED": odd, **tiles(dim, dtype)}
    options = {option: how.pop(option) for option in ("num_warps", "num_stages")}
    constants = {**how, **({} if odd else {"q_dim": 1, "k_dim": 1})}
    types = {name: "constexpr" if name in constants else "i32" for name in kernel.arg_names}
    types.update({name: "*fp32" for name in types if name.endswith("_ptr")})
    types.update(dict.fromkeys(("q_pos_ptr", "k_pos_ptr"), "*i32"), scale="fp32", cap="fp32")
    types.update(dict.fromkeys(("q_ptr", "k_ptr"), POINTERS[dtype]))
    aligned = (
        [] if odd else [(i,) for i, name in enumerate(types) if types[name][0] in "*i" and name not in ("G", "H_q")]
    )
    attributes = {place: [["tt.divisibility", 16]] for place in aligned}
    return triton.compiler.ASTSource(kernel, types, constants, attributes), options


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(("dim", "dtype", "odd"), [(256, torch.bfloat16, False), (80, torch.float32, True)])
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("kernel", ["_log_sum_exp", "_column_sums"])
def test_the_kernels_compile_into_the_shared_memory_of_any_gpu_since_2020(
    kernel: str, capability: int, dim: int, dtype: torch.dtype, odd: bool
) -> None:
    function = getattr(module, kernel)
    if not isinstance(function, triton.runtime.JITFunction):
        pytest.skip("TRITON_INTERPRET is set: nothing is compiled")
    source, options = signature(function, dim, dtype, odd)
    target = compiler.GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options=options)
    assert len(compiled.asm["cubin"]) > 0
    assert f"sm_{capability}" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 99 * 1024, "what a block may ask for on sm_86 and sm_89"
    assert "async_copy" in compiled.asm["ttgir"], "the next tile is loaded while this one is summed"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("path", [column_sums, column_sums_triton])
def test_a_cuda_device_gives_what_the_reference_gives(path: Any, name: str, cases: dict[str, Any]) -> None:
    call = {key: value.cuda() if isinstance(value, Tensor) else value for key, value in cases[name].items()}
    torch.testing.assert_close(path(**call).cpu(), column_sums_ref(**cases[name]), rtol=1e-4, atol=1e-4)
