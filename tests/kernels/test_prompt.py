"""Attention of prompts: by hand, flex_attention and its blocks against the reference, fused kernels on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parameters import few_fast
from torch.nn import functional as F

from kvbench.kernels import prompt
from kvbench.kernels.prompt import block_mask, flex_prompt_attention, prompt_attention, prompt_attention_ref
from kvbench.kernels.references import Attention, visible

CHOSEN = (
    "grouped-float32",
    "one-kv-head-bfloat16",
    "softcap-float16",
    "sliding-window-shuffled-float16",
    "empty-slots-and-padding-float32",
    "everything-float16",
    "one-slot-one-query-float32",
)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}  # of the output, in the dtype of values


def with_values(call: dict[str, Any], sinks: bool, extra: int = 5) -> dict[str, Any]:
    """The call with values of `extra` numbers more than the keys have, NaN in empty slots, and sinks."""
    random = torch.Generator().manual_seed(3)
    keys = call["keys"]
    values = torch.randn(*keys.shape[:3], keys.shape[3] + extra, generator=random).to(keys.dtype)
    logits = torch.randn(call["queries"].shape[1], generator=random) if sinks else None
    return {**call, "values": values, "sinks": logits}


@pytest.fixture(scope="module")
def calls(cases: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Every chosen case, without and with sinks."""
    drawn = {name: with_values(cases[name], sinks=False) for name in CHOSEN}
    drawn["sinks"] = with_values(cases["everything-float16"], sinks=True)
    drawn["sinks-padding"] = with_values(cases["empty-slots-and-padding-float32"], sinks=True)
    return drawn


def assert_close(got: Attention, expected: Attention) -> None:
    tolerance = TOLERANCE[expected.out.dtype]
    torch.testing.assert_close(got.out, expected.out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got.log_sum_exp, expected.log_sum_exp, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "case",
    few_fast(
        (*CHOSEN, "sinks", "sinks-padding"),
        ("grouped-float32", "everything-float16", "one-slot-one-query-float32", "sinks-padding"),
        pytest.mark.slow("flex_attention without a compiler"),
    ),
)
def test_flex_attention_equals_the_reference(case: str, calls: Any) -> None:
    assert_close(flex_prompt_attention(**calls[case]), prompt_attention_ref(**calls[case]))


@pytest.mark.parametrize("window", [None, 1, 90, 400])
@pytest.mark.parametrize("shuffled", [False, True])
def test_blocks_are_skipped_masked_or_whole_as_their_pairs_are_seen(window: int | None, shuffled: bool) -> None:
    random = torch.Generator().manual_seed(5)
    stored = torch.stack([torch.randperm(700, generator=random)[:600] for _ in range(2)])
    stored = (stored if shuffled else stored.sort().values)[None].clone()
    stored[0, 1, 300:500] = -1
    asked = torch.arange(400, 700)[None].clone()
    asked[0, :20] = -1
    mask = block_mask(asked, stored, window)
    pairs = F.pad(visible(asked, stored, window), (0, 640 - 600, 0, 384 - 300))  # of all blocks of 128
    pairs = pairs.unflatten(3, (-1, 128)).unflatten(2, (-1, 128)).transpose(3, 4)  # [1,2,3,5,128,128]
    some, whole = pairs.flatten(4).any(-1), pairs.flatten(4).all(-1)

    def listed(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        first = torch.arange(indices.shape[-1]) < counts[..., None]
        return torch.zeros(indices.shape, dtype=torch.bool).scatter(-1, indices.long(), first)

    full = listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    computed = full | listed(mask.kv_num_blocks, mask.kv_indices)
    assert not (full & ~whole).any(), "a block that needs a mask has one"
    assert not (some & ~computed).any(), "no pair is left out"
    if not shuffled:
        assert torch.equal(computed & ~some, computed & ~some & ~whole)
        assert computed.sum() <= some.sum() + 6, "ordered slots compute next to nothing that nobody sees"


def test_a_soft_cap_is_a_constant_of_the_compiled_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor compiles no kernel whose cap is an argument: a float on the host, which it would have to read."""
    compiled: list[list[object]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[object]) -> Any:
        compiled.append(inputs)
        return graph.forward

    monkeypatch.setattr(prompt, "flex_attention", prompt.compiled_flex.__wrapped__(backend))
    for cap in (20.0, 30.0):
        for length in (130, 270, 400):
            queries, keys = torch.randn(1, 4, length, 16), torch.randn(1, 2, length, 16)
            at = torch.arange(length)[None]
            call = queries, keys, keys, at, at[:, None].expand(-1, 2, -1), 0.25, cap
            assert_close(flex_prompt_attention(*call), prompt_attention_ref(*call))
    assert len(compiled) <= 3, "one kernel for all lengths, after that of the first one"
    kinds = {type(x) for inputs in compiled for x in inputs}
    assert kinds == {torch.Tensor, torch.SymInt}
    assert not [x for inputs in compiled for x in inputs if isinstance(x, torch.Tensor) and x.dim() == 0]


SHAPES = {  # H_q, H_kv, D of keys, D of values, and what attention does with them
    "llama": (8, 2, 128, 128, {}),
    "llama-in-any-order": (8, 2, 128, 128, {"aligned": False}),
    "gemma2": (8, 4, 256, 256, {"softcap": 50.0}),
    "gemma2-sliding": (8, 4, 256, 256, {"softcap": 50.0, "sliding_window": 300}),
    "gpt-oss": (16, 2, 64, 64, {"sinks": True}),
    "gpt-oss-sliding": (16, 2, 64, 64, {"sinks": True, "sliding_window": 128}),
    "padded": (8, 2, 64, 64, {"aligned": False, "padding": 40}),
    "small-heads": (4, 2, 8, 8, {}),
    "small-heads-softcap": (4, 2, 8, 8, {"softcap": 20.0, "sliding_window": 90, "sinks": True}),
    "latent": (4, 4, 96, 64, {}),
    "odd-heads": (6, 2, 80, 80, {"softcap": 20.0}),
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("older", [0, 500])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_cuda_equals_the_reference(shape: str, dtype: torch.dtype, older: int) -> None:
    heads, kv_heads, dim, value_dim, fields = SHAPES[shape]
    random = torch.Generator().manual_seed(older)
    queries = torch.randn(2, 277, heads, dim, generator=random).transpose(1, 2)
    keys, values = (torch.randn(2, kv_heads, 277 + older, n, generator=random) for n in (dim, value_dim))
    how = {"aligned": True, **fields}
    padding = how.pop("padding", 0)
    if "sinks" in how:
        how["sinks"] = torch.randn(heads, generator=random)
    asked, held = torch.arange(older, 277 + older).repeat(2, 1), torch.arange(277 + older).repeat(2, kv_heads, 1)
    if padding:
        asked[1], held[1] = asked[1] - padding, held[1] - padding  # -1 where nothing is
        asked[asked < 0], held[held < 0] = -1, -1
    call = [x.to(dtype) for x in (queries, keys, values)] + [asked, held]
    expected = prompt_attention_ref(*call, dim**-0.5, **{name: x for name, x in how.items() if name != "aligned"})
    there = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in how.items()}
    got = prompt_attention(*(x.cuda() for x in call), dim**-0.5, **there)
    near = 2e-2 if dtype.itemsize == 2 else 1e-4
    torch.testing.assert_close(got.out.cpu(), expected.out, rtol=near, atol=near)
    torch.testing.assert_close(got.log_sum_exp.cpu(), expected.log_sum_exp, rtol=1e-3, atol=1e-3)


def test_the_reference_is_the_attention_of_pytorch() -> None:
    random = torch.Generator().manual_seed(1)
    queries = torch.randn(2, 4, 33, 16, generator=random)
    keys, values = torch.randn(2, 2, 33, 16, generator=random), torch.randn(2, 2, 33, 16, generator=random)
    at = torch.arange(33).repeat(2, 1)
    got = prompt_attention_ref(queries, keys, values, at, at[:, None].expand(-1, 2, -1), 0.25)
    expected = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=0.25, enable_gqa=True)
    torch.testing.assert_close(got.out, expected)
