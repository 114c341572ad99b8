"""Policies and stores whose kernels Triton interprets keep and generate what those of plain PyTorch do."""

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_interpreted import Interpreter
from kernel_policies import run, run_rows
from kv_presets import protecting
from safetensors.torch import save_file

from kvbench import preset_names

QUANTISED: dict[str, dict[str, Any]] = {
    "kivi in groups": {"group": 8, "residual": 16},
    "kivi whole": {"group": 128, "residual": 128, "bits": 2},
    "ott": {"group": 8, "residual": 5, "auxiliary": 4, "skip_layers": [0]},
    "kcvc": {"group": 8, "residual": 8},
    **{slug: {} for slug in ("fp8", "fp8_per_token_head", "int8", "int4", "turboquant")},
    "nvfp4": {"group": 8},
}


def same(interpret: Interpreter, slug: str, **case: Any) -> dict[str, Any]:
    """What the kernels give, if it is what PyTorch gives.

    The model's numbers differ in their last bits, so that one of a thousand may get the code beside its own.
    """
    got, expected = interpret(run, slug=slug, **case), run(slug, **case)
    assert (got["interpreted"], expected["interpreted"]) == (True, False)
    assert got["tokens"] == expected["tokens"]
    assert got["kept"] == expected["kept"]
    for name in {"keys", "values"} & set(got):
        near = torch.isclose(got[name], expected[name], rtol=1e-3, atol=1e-3)
        assert near.float().mean() > 0.999
    return got


def decodes_in_kernels(interpret: Interpreter, case: str) -> None:
    """case: slug:family:sequences of the batch."""
    slug, family, rows = case.split(":")
    budget = None if slug == "full" else 36
    same(interpret, slug, family=family, lengths=[48 - 3 * row for row in range(int(rows))], budget=budget)


@pytest.mark.slow("interprets kernels")
def test_the_parts_of_a_prompt_are_scored_by_their_own_queries_beside_the_kernels(interpret: Interpreter) -> None:
    same(interpret, "fair_snapkv", lengths=[24], budget=14, fields={"window": 6}, parts=(0, 10))


@pytest.mark.slow("interprets kernels")
def test_a_budget_that_is_a_share_of_all_tokens_is_kept_beside_the_kernels(interpret: Interpreter) -> None:
    same(interpret, "tova", lengths=[24], budget=0.5, fields={"decode": "share"})


@pytest.mark.slow("interprets kernels")
def test_sequences_of_several_budgets_keep_the_same_tokens(interpret: Interpreter) -> None:
    """A prompt of 48 tokens, which one of the budgets exceeds; all sequences decode in one launch per layer."""
    case = {"slugs": ("tova",), "budgets": (34, 60), "lengths": (48,)}
    got, expected = interpret(run_rows, **case), run_rows(**case)
    assert got["tokens"] == expected["tokens"]
    assert got["kept"] == expected["kept"]


@pytest.mark.slow("interprets kernels")
@pytest.mark.parametrize(
    "case",
    [
        *("h2o:gemma2:2", "tova:gemma2:1", "roco:mistral:2", "full:gemma2:2", "ada_snapkv:gemma2:1"),
        *("h2o:gemma4:2", "tova:deepseek_v3:2", "caote_tova:deepseek_v3:1", "attention_matching:llama:2"),
    ],
)
def test_soft_caps_sliding_windows_shared_layers_and_latents_go_through_the_kernel(
    case: str, interpret: Interpreter
) -> None:
    decodes_in_kernels(interpret, case)


@pytest.mark.slow("interprets kernels")
@pytest.mark.parametrize(
    "slug", sorted({*preset_names()} - {"kvpress", "triattention", "kvzap", "fast_kvzip"})
)  # one needs a press, the others trained files
def test_every_preset_keeps_and_generates_the_same(slug: str, interpret: Interpreter, tmp_path: Path) -> None:
    """Prompt, evictions and decoding from end to end, in whatever kernels its parts have."""
    windowed = slug.startswith(("cake", "kvec", "headkv")) or slug.endswith(("snapkv", "pyramidkv"))
    own = {"gemfilter": {"layer": 1}, "vase": {"window": 6, "every": 8}, "nvfp4": QUANTISED["nvfp4"]}
    fields: dict[str, Any] = {"window": 6} if windowed else {**own.get(slug, {})}
    if slug.startswith(("headkv", "duoattention")):
        heads = 4 if slug.startswith("headkv") else 2  # query heads, or KV heads
        names = [f"{layer}-{head}" for layer in range(2) for head in range(heads)]
        (tmp_path / "heads.json").write_text(json.dumps(dict(zip(names, count(1)))))
        fields["importance"] = str(tmp_path / "heads.json")
    if slug == "qfilters":
        save_file({"q_filters": torch.eye(8)[:4].view(2, 2, 8)}, tmp_path / "filters.safetensors")
        fields["filters"] = str(tmp_path / "filters.safetensors")
    same(interpret, slug, budget=50 if slug in protecting() else 36, fields=fields)


@pytest.mark.slow("interprets kernels")
@pytest.mark.parametrize("store", QUANTISED)
def test_quantised_stores_generate_the_same(store: str, interpret: Interpreter) -> None:
    slug = store.split()[0]
    same(interpret, slug, lengths=(140, 33), budget=None, fields=QUANTISED[store], stored=True)
