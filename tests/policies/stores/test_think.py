"""ThinK: which channels go, what is held of them, and that attention reads zeros in their place."""

import pytest
import torch
from kv_models import prompt, tiny
from kv_stores import attended, feed, plain_attention, stream
from torch import Tensor
from transformers import DynamicCache

from kvbench import KVCache, make_policy
from kvbench.cache.hook import prepare
from kvbench.policies.stores.think import ThinK


def by_hand(queries: Tensor, keys: Tensor, store: ThinK, prompt: int) -> Tensor:
    """Keys [H,T,D] with zeros where the paper's scores are lowest, loop by loop; queries [H_q,T,D]."""
    found = keys.clone()
    group, dim = len(queries) // len(keys), keys.shape[-1]
    for head, own in enumerate(keys):
        scores = []
        for d in range(dim):
            asked = [
                float(queries[g, t, d]) ** 2
                for g in range(head * group, (head + 1) * group)
                for t in range(prompt - store.query_window, prompt)
            ]
            drawn = [float(own[t, d]) ** 2 for t in range(prompt)]
            scores.append(sum(asked) / len(asked) * sum(drawn) / len(drawn))
        worst = sorted(range(dim), key=lambda d: scores[d])[: int(dim * store.ratio)]
        found[head, : prompt - store.residual, worst] = 0
    return found


@pytest.mark.parametrize(("ratio", "window", "residual"), [(0.5, 4, 3), (0.25, 10, 0), (0.9, 1, 8), (0.0, 4, 2)])
def test_the_channels_that_go_are_those_of_the_equation(ratio: float, window: int, residual: int) -> None:
    keys, values = stream(40, dim=8)
    queries, store = torch.randn(1, 6, 40, 8), ThinK(ratio=ratio, query_window=window, residual=residual)
    held = feed(store, keys, values, [20, 10, 1, 9], queries=queries, prompt=30)
    assert torch.equal(held.keys[0], by_hand(queries[0], keys[0], store, 30))
    assert torch.equal(held.values, values)
    newest = queries[:, :, -1:]
    torch.testing.assert_close(attended(held, newest, 39), plain_attention(newest, held.keys, values).float())


def test_bytes_are_those_of_the_channels_held_and_their_list() -> None:
    keys, values = stream(448, heads=3, dim=128, dtype=torch.float16)
    held = feed(ThinK(ratio=0.4), keys, values, queries=torch.randn(1, 6, 448, 128).half())
    assert held.sizes().kinds == {
        "codes": 0,
        "scales and minima": 0,
        "pruned keys": 3 * (448 - 32) * 77 * 2,  # 128 - floor(51.2) channels
        "channels": 3 * 77 * 2,
        "full precision": 3 * 2 * 128 * (32 + 448),
        "positions": 0,
    }


def test_heads_of_different_lengths_are_pruned_each_by_itself() -> None:
    model, policy = tiny(), make_policy("ada_snapkv_think_r0.5", 30, window=8, residual=8)
    model.set_attn_implementation("kvbench")
    cache = KVCache(model.config, policy)
    dense = KVCache(model.config, make_policy("ada_snapkv", 30, window=8))
    with torch.inference_mode():
        for one in (cache, dense):
            model(torch.tensor([prompt(90)]), past_key_values=one)
    layer, full = cache.layers[0], dense.layers[0]
    counts = layer.kept_tokens()[0].tolist()
    assert len(set(counts)) > 1
    for head, count in enumerate(counts):
        keys, exact = layer.keys[0, head, :count], full.keys[0, head, :count]
        gone = (keys[: count - 8] == 0).all(0)
        assert int(gone.sum()) == 4
        assert torch.equal(keys[: count - 8], exact[: count - 8].masked_fill(gone, 0))
        assert torch.equal(keys[count - 8 :], exact[count - 8 :])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_are_those_of_kvpress_which_writes_zeros(family: str) -> None:
    """Its `window_size` only judges: it prunes the newest keys as well."""
    kvpress = pytest.importorskip("kvpress", reason="kvpress is not installed")
    ids, ours, theirs = torch.tensor([prompt(63)]), [], []
    policy = make_policy("think", ratio=0.5, query_window=16, residual=0)
    with torch.inference_mode():
        model = tiny(family, dtype=torch.float32)
        cache = DynamicCache()
        with kvpress.ThinKPress(key_channel_compression_ratio=0.5, window_size=16)(model):
            model(ids[:, :60], past_key_values=cache, cache_position=torch.arange(60))  # which presses ask for
        theirs = [model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(60, 63)]
        model = prepare(tiny(family, dtype=torch.float32))
        held = KVCache(model.config, policy)
        model(ids[:, :60], past_key_values=held)
        ours = [model(ids[:, t : t + 1], past_key_values=held).logits for t in range(60, 63)]
    torch.testing.assert_close(torch.cat(ours), torch.cat(theirs), rtol=1e-4, atol=1e-4)
