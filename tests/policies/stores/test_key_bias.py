"""unbias_keys: the codes are those of a model without the bias, and what is read back has it again."""

from typing import Any

import pytest
import torch
from kv_models import prompt, rotated, tiny
from torch import Tensor

from kvbench import KVCache, generate, make_policy
from kvbench.errors import ConfigError

LARGE = 20.0  # times the bias of a tiny model


def model_with_bias(factor: float) -> Any:
    """A Qwen2 whose key biases are multiplied; layer 0 computes the same keys but for the bias."""
    model = tiny("qwen2")
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.data *= factor
    model.set_attn_implementation("kvbench")
    return model


def stored(model: Any, slug: str, budget: int | None = None, fed: int = 40, more: int = 8, **fields: Any) -> Any:
    """The store of layer 0 after a prompt of `fed` tokens and `more` given ones."""
    ids = torch.tensor([prompt(fed + more)])
    cache = KVCache(model.config, make_policy(slug, budget, **fields), prompt_length=fed)
    with torch.inference_mode():
        model(ids[:, :fed], past_key_values=cache)
        for position in range(fed, fed + more):
            model(ids[:, position : position + 1], past_key_values=cache)
    return cache.layers[0].states[0].store


def bias_at(model: Any, positions: Tensor) -> Tensor:
    """The rotated bias of layer 0 at positions [1,H,n], element by element: [1,H,n,D]."""
    bias = model.model.layers[0].self_attn.k_proj.bias.data.view(positions.shape[1], -1)
    rows = [[rotated(bias[head], int(p)) for p in positions[0, head]] for head in range(len(bias))]
    return torch.stack([torch.stack(row) for row in rows])[None]


CASES: list[tuple[str, int | None, dict[str, Any]]] = [
    ("int4", None, {}),
    ("nvfp4", None, {"group": 4}),
    ("turboquant_2.5", None, {}),
    ("streamingllm_int4", 20, {"decode": "evict"}),
    ("streamingllm_turboquant_b3", 20, {"decode": "grow", "schedule": "blocks", "block": 16}),
]


def in_order(store: Any, x: Tensor) -> Tensor:
    """Slots of x [1,H,C,...] that hold a token, in order of position: [H,n,...]."""
    order = [torch.tensor(sorted(range(len(own)), key=own.__getitem__)) for own in store.positions[0].tolist()]
    held = [index[own[index] >= 0] for index, own in zip(order, store.positions[0], strict=True)]
    return torch.stack([x[0, head][index] for head, index in enumerate(held)])


@pytest.mark.parametrize(("slug", "budget", "fields"), CASES)
def test_codes_are_those_of_a_model_without_the_bias(slug: str, budget: int | None, fields: dict[str, Any]) -> None:
    biased = model_with_bias(LARGE)
    found = stored(biased, slug, budget, unbias_keys=True, **fields)
    plain = stored(model_with_bias(0.0), slug, budget, **fields)
    positions, expected = (in_order(store, store.positions) for store in (found, plain))
    assert torch.equal(positions, expected)
    codes = {name for name in plain.memory if name.endswith("codes")}
    assert codes
    for name in codes:
        assert torch.equal(in_order(found, found._view(name)), in_order(plain, plain._view(name)))
    difference = in_order(found, found.keys) - in_order(plain, plain.keys)
    torch.testing.assert_close(difference, bias_at(biased, positions[None])[0], rtol=1e-5, atol=1e-5)


def test_heads_that_keep_their_own_tokens_have_the_bias_of_their_kv_head() -> None:
    model, ids = model_with_bias(LARGE), torch.tensor([prompt(40)])
    policy = make_policy("snapkv_int8", 24, window=8, granularity="query_head", unbias_keys=True)
    exact = make_policy("snapkv", 24, window=8, granularity="query_head")
    found, full = (generate(model, ids, one, max_new_tokens=1).cache.layers[0] for one in (policy, exact))
    assert torch.equal(found.positions, full.positions)
    torch.testing.assert_close(found.keys, full.keys, rtol=0, atol=0.05)


def test_a_model_without_a_bias_is_refused() -> None:
    model = tiny("llama")
    model.set_attn_implementation("kvbench")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"has keys without a bias, .*: use unbias_keys=false, or a model such as"):
            stored(model, "int4", unbias_keys=True)


def test_it_is_a_truth_value_and_cannot_rotate_keys_twice() -> None:
    with pytest.raises(ConfigError, match=r"unbias_keys must be true or false"):
        make_policy("int4", unbias_keys="maybe")
    with pytest.raises(ValueError, match=r"unbias_keys=true does not support rerotate=true"):
        stored(model_with_bias(1.0), "streamingllm_int4", 20, unbias_keys=True, rerotate=True, decode="grow")
