"""Attention on packed codes: the reference by hand, the kernels interpreted, compiled, and run where there is a GPU."""

from __future__ import annotations

import math
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from kv_quantised import ATTENTION, Case, interpreted
from kv_stores import attended, feed, stream

from kvbench.kernels import quantised_attention, quantised_groups
from kvbench.kernels.quantised_attention import (
    Outliers,
    Packed,
    Side,
    quantised_attention_ref,
    quantised_attention_triton,
)
from kvbench.policies.stores.kivi import Kivi
from kvbench.policies.stores.packed import side

triton = pytest.importorskip("triton", reason="Triton has wheels for Linux only")
compiler = pytest.importorskip("triton.backends.compiler")

FLOAT32: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}  # a code that is off by one moves the output by 1e-3 and more


def wide(call: dict[str, Any]) -> dict[str, Any]:
    """The same call with queries in float32, so that the output is not rounded."""
    return {**call, "queries": call["queries"].float()}


@pytest.fixture(scope="module")
def calls() -> dict[str, dict[str, Any]]:
    return {name: wide(case.draw(seed)) for seed, (name, case) in enumerate(ATTENTION.items())}


@pytest.fixture(scope="module")
def outputs(calls: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("interpreted")
    return interpreted("kvbench.kernels.quantised_attention", "quantised_attention_triton", calls, folder)


def by_hand(outliers: Outliers | None) -> dict[str, Any]:
    """Keys 0 and log 2 in codes 0 and 3, log 1 in the tail; values 1, 2 and 5."""
    ones = torch.ones(1, 1, 2, 1)
    keys = Packed(torch.tensor([[[[[12]]]]], dtype=torch.int32), ones[:, :, :1] * math.log(2) / 3, 0 * ones[:, :, :1],
                  2, 2, False)  # fmt: skip
    words = torch.zeros(1, 1, 2, 1, 1, dtype=torch.int32)
    values = Packed(words, ones, torch.tensor([[[[1.0], [2.0]]]]), 2, 1, True)
    return {
        "queries": torch.ones(1, 1, 1, 1),
        "query_positions": torch.tensor([[2]]),
        "keys": Side(keys, torch.zeros(1, 1, 1, 1)),
        "values": Side(values, torch.full((1, 1, 1, 1), 5.0)),
        "scaling": 1.0,
        "outliers": outliers,
    }


def test_the_reference_by_hand() -> None:
    out, log_sum_exp = quantised_attention_ref(**by_hand(None))
    assert out.item() == pytest.approx((1 * 1 + 2 * 2 + 1 * 5) / 4)
    assert log_sum_exp.item() == pytest.approx(math.log(4))
    exact = Outliers(torch.tensor([[[[math.log(3)]]]]), torch.tensor([[[[7.0]]]]), torch.tensor([[[1]]]).int())
    out, log_sum_exp = quantised_attention_ref(**by_hand(exact))  # the token at slot 1 counts once, with its exact key
    assert out.item() == pytest.approx((1 * 1 + 3 * 7 + 1 * 5) / 5)
    assert log_sum_exp.item() == pytest.approx(math.log(5))


def test_the_reference_gives_what_a_store_gives_from_its_codes() -> None:
    held = feed(Kivi(group=32, residual=32), *stream(150, dim=64))
    queries = torch.randn(1, 6, 1, 64)
    keys, values = (side(column) for column in held._columns)
    assert keys is not None
    assert values is not None
    got = quantised_attention_ref(queries, torch.tensor([[149]]), keys, values, 64**-0.5)
    torch.testing.assert_close(got.out, attended(held, queries, 149), **FLOAT32)


@pytest.mark.parametrize("name", ATTENTION)
def test_the_kernels_equal_the_reference(name: str, calls: dict[str, Any], outputs: dict[str, Any]) -> None:
    expected = quantised_attention_ref(**calls[name])
    torch.testing.assert_close(outputs[name][0], expected.out, **FLOAT32)
    torch.testing.assert_close(outputs[name][1], expected.log_sum_exp, **FLOAT32)


def test_whole_groups_take_the_fast_way_where_values_have_one_scale() -> None:
    fast = {
        name
        for name, case in ATTENTION.items()
        for keys, values in [(case.draw(0)["keys"].packed, case.draw(0)["values"].packed)]
        if quantised_groups.serves(keys, values, case.group, case.dim, case.value_dim)
    }
    assert set(ATTENTION) - fast == {
        "small-groups", "groups-that-end-inside-a-word", "values-per-channel-as-in-kcvc",
        "ragged-heads-small-groups-softcap",
    }  # fmt: skip


def test_a_sequence_that_asks_nothing_gets_nothing(outputs: dict[str, Any]) -> None:
    out, log_sum_exp = outputs["a-sequence-that-asks-nothing"]
    assert not out[1].any()
    assert bool((log_sum_exp[1] == -torch.inf).all())
    assert out[0].any()


def compiled(kernel: Any, arguments: dict[str, Any], capability: int) -> Any:
    """A kernel as a launch with these arguments would compile it: tensors by dtype, numbers as int32, rest constant."""
    constants = {name: value for name, value in arguments.items() if name.isupper()}
    constants |= {name: 1 for name, value in arguments.items() if value == 1 and name.split("_")[-1] == "entry"}
    options = {name: arguments[name] for name in ("num_warps", "num_stages") if name in arguments}
    types = {name: "constexpr" if name in constants else "i32" for name in kernel.arg_names}
    names = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32",
             torch.int16: "i16", torch.uint8: "u8"}  # fmt: skip
    types.update({name: f"*{names[arguments[name]]}" for name in types if name.endswith("_ptr")})
    types.update({name: "fp32" for name in ("scale", "cap") if name in types})
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(types)
        if types[name][0] == "*"
        or (name.split("_")[-1] in ("batch", "head", "entry", "token") and types[name] == "i32")
    }
    source = triton.compiler.ASTSource(kernel, types, constants, attributes)
    return triton.compile(source, target=compiler.GPUTarget("cuda", capability, 32), options=options)


def groups_arguments(dim: int, bits: int, entries: int) -> dict[str, Any]:
    """What `groups_launch` asks for at 4 query heads per KV head of `dim`, with full words in every group."""
    halves = dim * bits // 16
    block = max(16, 1 << (dim - 1).bit_length()), max(16, 1 << (halves - 1).bit_length())
    return {
        "q_ptr": torch.bfloat16, "kw_ptr": torch.int16, "vw_ptr": torch.int16, "slots_ptr": torch.int32,
        "lengths_ptr": torch.int32, "out_ptr": torch.float32, "lse_ptr": torch.float32,
        **dict.fromkeys(("ks_ptr", "km_ptr", "vs_ptr", "vm_ptr"), torch.float16), "vm_entry": 1,
        "G": 4, "D": dim, "D_V": dim, "E": entries, "U": 256 // bits, "KEY_BITS": bits, "VALUE_BITS": bits,
        "VALUE_HALVES": halves, "EVEN": True, "CAPPED": False, "TOP": quantised_groups.LOUD, "BLOCK_D": block[0],
        "BLOCK_L": block[1], "BLOCK_E": 64, "PAIRS": True, **quantised_groups.launch(dim, bits),
    }  # fmt: skip


def tokens_arguments(dim: int, bits: int, entries: int) -> dict[str, Any]:
    """What `_tokens` is asked for in the same place."""
    pointers = {"q_ptr": torch.bfloat16, "kw_ptr": torch.int32, "vw_ptr": torch.int32, "lengths_ptr": torch.int32,
                "slots_ptr": torch.int32, "out_ptr": torch.float32, "lse_ptr": torch.float32}  # fmt: skip
    return {
        **pointers,
        **dict.fromkeys(("ks_ptr", "km_ptr", "vs_ptr", "vm_ptr"), torch.float16),
        **dict.fromkeys(("kt_ptr", "vt_ptr", "ke_ptr", "ve_ptr"), torch.bfloat16),
        "G": 4, "D": dim, "D_V": dim, "E": entries, "KEY_BITS": bits, "KEY_UNIT": 128, "KEY_WIDTH": 4 * bits,
        "KEY_PER_TOKEN": False, "VALUE_BITS": bits, "VALUE_UNIT": dim, "VALUE_WIDTH": dim * bits // 32,
        "VALUE_PER_TOKEN": True, "WHOLE": 128, "EVEN": True, "CAPPED": False, "BLOCK_E": 64,
        **quantised_attention.tiles(dim, dim, 4),
    }  # fmt: skip


def stack(kernel: Any, folder: Path) -> int:
    """Bytes a thread keeps in local memory."""
    (folder / "kernel.cubin").write_bytes(kernel.asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path
    usage = subprocess.run([tool, "-res-usage", folder / "kernel.cubin"], capture_output=True, text=True, check=True)
    return int(re.search(r"STACK:(\d+)", usage.stdout + usage.stderr)[1])  # type: ignore[index]


KERNELS = {
    "groups": (quantised_groups._groups, groups_arguments),
    "tokens": (quantised_attention._tokens, tokens_arguments),
}
MAIN = [(name, 128, 2, 90, 35) for name in KERNELS]
ALL = [
    pytest.param(name, dim, bits, capability, entries, marks=pytest.mark.slow)
    for name in KERNELS
    for dim in (64, 80, 96, 128, 256)
    for bits in (2, 4, 8)
    for capability in (80, 90, 100)
    for entries in (0, 35)
]


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(("name", "dim", "bits", "capability", "entries"), [*MAIN, *ALL])
def test_the_kernels_compile_for_gpus_since_2020(
    name: str, dim: int, bits: int, capability: int, entries: int, tmp_path: Path
) -> None:
    kernel, arguments = KERNELS[name]
    if not isinstance(kernel, triton.runtime.JITFunction):
        pytest.skip("TRITON_INTERPRET is set: nothing is compiled")
    asked = arguments(dim, bits, entries)
    got = compiled(kernel, asked, capability)
    assert len(got.asm["cubin"]) > 0
    assert got.metadata.shared <= 99 * 1024, "what a block may ask for on sm_86 and sm_89"
    if name == "groups":
        assert "mma.sync" in got.asm["ptx"]
        assert "cp.async" in got.asm["ptx"], "the next group is loaded while this one is summed"
    if dim in (64, 128) and bits < 8:
        assert stack(got, tmp_path) <= (0 if name == "groups" else 8), "bytes of registers spilled"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("name", ATTENTION)
def test_a_cuda_device_gives_what_the_reference_gives(name: str) -> None:
    for seed in range(3):
        case = ATTENTION[name]
        got = quantised_attention_triton(**wide(case.draw(seed, "cuda")))
        expected = quantised_attention_ref(**wide(case.draw(seed)))
        torch.testing.assert_close(got.out.cpu(), expected.out, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(got.log_sum_exp.cpu(), expected.log_sum_exp, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_many_tokens_on_a_cuda_device(bits: int) -> None:
    case = Case(batch=2, heads=8, dim=128, value_dim=128, value_unit=128, keys=32768, values=32768, tokens=32800,
                bits=bits, outliers=35, dtype=torch.bfloat16)  # fmt: skip
    call = wide(case.draw(0, "cuda"))
    expected = quantised_attention_ref(**call)
    got = quantised_attention_triton(**call)
    torch.testing.assert_close(got.out, expected.out, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(got.log_sum_exp, expected.log_sum_exp, rtol=1e-4, atol=1e-4)


def test_the_kernel_without_triton_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbench.kernels.jit.triton", None)
    with pytest.raises(ValueError, match="quantised_attention on device cpu needs Triton, which is not installed here"):
        quantised_attention_triton(**ATTENTION["outliers"].draw(0))


def test_nothing_as_large_as_the_dequantised_tensors_is_made(tmp_path: Path) -> None:
    case = Case(keys=512, values=512, tokens=520, outliers=3)
    largest = interpreted("kv_allocations", "largest", {"call": case.draw(0)}, tmp_path)["call"][0]
    assert 0 < largest < 512 * 64 * 2
