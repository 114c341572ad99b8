"""Every kernel compiled for an H100 that need not be there, with the arguments its launcher passes."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kvbench.kernels import decode, quantized, query_sums
from kvbench.kernels.quantized import Packed, Side
from kvbench.kernels.references import NewTokens

triton = pytest.importorskip("triton", reason="Triton has wheels for Linux only")

OPTIONS = ("num_warps", "num_stages", "maxnreg")
SHARED = 227 * 1024  # bytes of shared memory a block may ask for on sm_90
POINTERS = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int64: "*i64", torch.int32: "*i32",
    torch.uint8: "*u8",
}  # fmt: skip
B, H_KV, G, T, D = 2, 8, 4, 8192, 128


def empty(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def asked(queries: int) -> tuple[Any, ...]:
    """Queries, keys, both positions and the scaling."""
    places = empty(B, queries, dtype=torch.int64), empty(B, H_KV, T, dtype=torch.int32)
    return empty(B, queries, H_KV * G, D).transpose(1, 2), empty(B, T, H_KV, D).transpose(1, 2), *places, 0.1


def decoding(packed: bool) -> None:
    queries, keys, *rest = asked(1)
    decode.decode_attention(queries, keys, keys, *rest, packed=packed, weights=True)


def decoding_flat() -> None:
    queries, _, places, *_ = asked(1)
    flat, where = empty(B * H_KV * T, D), empty(B, H_KV, dtype=torch.int64)
    new = NewTokens(empty(B, H_KV, 1, D), empty(B, H_KV, 1, D), where)
    decode.decode_attention_flat(
        queries, flat, flat, places, empty(len(flat), dtype=torch.int32), where, where, T, 0.1,
        sums=empty(len(flat), 1, dtype=torch.float32), new_tokens=new,
    )  # fmt: skip


def summing(function: Callable[..., object], aligned: bool) -> None:
    function(*asked(T), log_sum_exp=empty(B, H_KV * G, T, dtype=torch.float32), aligned=aligned)


def on_codes(bits: int) -> None:
    words = empty(B, H_KV, T // 128, D, 128 * bits // 32, dtype=torch.int32)
    scale = empty(B, H_KV, T // 128, D, dtype=torch.float16)
    keys = Packed(words, scale, scale, bits, 128, False)
    each = empty(B, H_KV, T, 1, dtype=torch.float16)
    values = Packed(empty(B, H_KV, T, 1, D * bits // 32, dtype=torch.int32), each, each, bits, D, True)
    tail = empty(B, H_KV, 128, D)
    quantized.quantised_attention(asked(1)[0], asked(1)[2], Side(keys, tail), Side(values, tail), 0.1)


CALLS: dict[str, Callable[[], None]] = {
    "decode packed": lambda: decoding(True),
    "decode by position": lambda: decoding(False),
    "decode flat, appending": decoding_flat,
    "column sums in order": lambda: summing(query_sums.column_sums, True),
    "column sums by position": lambda: summing(query_sums.column_sums, False),
    "moments in order": lambda: summing(query_sums.attention_moments, True),
    "window of 32": lambda: query_sums.window_statistics(*asked(32)) and None,
    "2 bits": lambda: on_codes(2),
    "4 bits": lambda: on_codes(4),
}


def launches(call: Callable[[], None]) -> list[tuple[Any, dict[str, Any]]]:
    """The kernels that a call launches on an H100, with their arguments by name; nothing runs."""
    noted: list[tuple[Any, dict[str, Any]]] = []

    class Noted:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args, **how: noted.append(
                (self.kernel, dict(zip(self.kernel.arg_names, args, strict=False)) | how)
            )

    with pytest.MonkeyPatch.context() as patch, FakeTensorMode():
        for module in (decode, quantized, query_sums):
            patch.setattr(module, "use_triton", lambda x: True, raising=False)
            patch.setattr(module, "programs_at_once", lambda device: 264, raising=False)
            for name, kernel in list(vars(module).items()):
                if isinstance(kernel, triton.runtime.JITFunction) and name.startswith("_"):
                    patch.setattr(module, name, Noted(kernel))
        call()
    return noted


def compiled(kernel: Any, arguments: dict[str, Any]) -> Any:
    """The kernel as Triton compiles it: sizes of one are constants, multiples of 16 are known."""
    types: dict[str, Any] = {}
    constants: dict[Any, Any] = {}
    known: dict[tuple[int, ...], Any] = {}

    def typed(value: Any, path: tuple[int, ...], varies: bool) -> Any:
        if isinstance(value, tuple):
            fields = [typed(field, (*path, place), varies) for place, field in enumerate(value)]
            return type(value)(*fields) if hasattr(value, "_fields") else tuple(fields)
        if value is None or (isinstance(value, int) and value == 1 and not varies):
            constants[path] = value
            return "constexpr"
        if isinstance(value, float):
            return "fp32"
        if isinstance(value, Tensor) or (value % 16 == 0 and not varies):
            known[path] = [["tt.divisibility", 16]]
        return POINTERS[value.dtype] if isinstance(value, Tensor) else "i32" if abs(value) < 2**31 else "i64"

    for place, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr:
            types[parameter.name], constants[parameter.name] = "constexpr", value
        else:
            types[parameter.name] = typed(value, (place,), parameter.do_not_specialize)
    source = triton.compiler.ASTSource(kernel, types, constants, known)
    options = {name: value for name, value in arguments.items() if name in OPTIONS}
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    return triton.compile(source, target=target, options=options)


def spilled(cubin: bytes) -> int:
    """Bytes of a thread's local memory: the registers that do not fit."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return max(map(int, re.findall(r"STACK:(\d+)", done.stdout)))


@pytest.mark.parametrize(
    "name", [name if name.startswith("2") else pytest.param(name, marks=pytest.mark.slow("compiles")) for name in CALLS]
)
def test_kernels_compile_for_an_h100_without_spills(name: str) -> None:
    found = launches(CALLS[name])
    assert found
    for kernel, arguments in found:
        made = compiled(kernel, arguments)
        assert "sm_90" in made.asm["ptx"]
        assert made.metadata.shared <= SHARED, kernel.__name__
        assert spilled(made.asm["cubin"]) == 0, kernel.__name__
