"""Counted bytes are the bytes that the device allocated."""

import gc
from functools import cache
from typing import Any

import pytest
import torch
from kv_models import prompt, small
from kv_runs import bytes_held
from transformers import PreTrainedModel

from kvbench import KVCache, make_policy
from kvbench.cache.hook import prepare


@cache
def phi3() -> PreTrainedModel:
    """Queries, keys and values out of one projection: values are a view of all three."""
    return prepare(small("phi3", torch.float32))


@torch.inference_mode()
@pytest.mark.parametrize(
    ("slug", "fields"), [("full", {}), ("snapkv", {"window": 4}), ("h2o", {"block": 8}), ("kivi", {})]
)
def test_a_fused_projection_is_not_kept_alive_behind_the_values(slug: str, fields: dict[str, Any]) -> None:
    held = KVCache(phi3().config, make_policy(slug, 16, **fields), prompt_length=37)
    ids = torch.tensor([prompt(40, seed=seed) for seed in range(2)])
    for tokens in ids[:, :37].split([20, 17], dim=1) if slug != "kivi" else [ids[:, :37]]:
        phi3()(tokens, past_key_values=held)
        assert bytes_held(held.layers) == held.nbytes
    phi3()(ids[:, 37:38], past_key_values=held)
    assert bytes_held(held.layers) == held.nbytes


def large(dtype: torch.dtype) -> PreTrainedModel:
    """Wide enough that a cache of some thousand tokens is megabytes."""
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 4096}
    return prepare(small("phi3", dtype, **sizes, **heads).to("cuda"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@torch.inference_mode()
@pytest.mark.parametrize("slug", ["full", "snapkv", "h2o", "caote_tova", "ada_snapkv", "kivi"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_counted_bytes_are_what_the_device_gave_out(slug: str, dtype: torch.dtype) -> None:
    model, ids = large(dtype), torch.randint(1, 512, (1, 2048), device="cuda")
    for _ in range(2):  # the first time workspaces of libraries are allocated, which stay
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        held = KVCache(model.config, make_policy(slug, 512))
        for token in (ids, *[ids[:, t : t + 1] for t in range(6)]):
            model(token, past_key_values=held, logits_to_keep=1)
        gc.collect()
        given, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
        counted, counted_peak = held.nbytes, held.peak_nbytes
        del held
    assert counted <= given <= 1.01 * counted + 2**17  # what is given out comes in whole 512 bytes
    assert counted <= counted_peak <= peak
