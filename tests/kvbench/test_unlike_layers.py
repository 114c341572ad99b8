"""Layers that differ in their number of KV heads, and in the numbers of a key and of a value: each holds its own."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from kv_models import SLIDING, VOCABULARY, prompt, small
from kv_oracle import Array, Glance, Head, Rules, SlowSequence
from kv_runs import assert_full_is_eager, assert_rows_alone, policy_for, run_greedy
from kv_simulate import attending, generate
from transformers import DynamicCache, PreTrainedModel

from kvbench import KVCache, make_policy
from kvbench.cache.hook import prepare
from kvbench.engine.generate import generate_tokens
from kvbench.models.cache_shapes import CacheShape, from_config
from kvbench.models.files import ModelSpec
from kvbench.models.loading import Checkpoint
from kvbench.policies.policy import Policy
from kvbench.tools.cache_bytes import predict

WINDOW, FULL = "sliding_attention", "full_attention"
NEW, BUDGET = 6, 24
SHAPES = {  # KV heads, and numbers of a key and of a value, of every layer; MiMo's code doubles heads that slide
    "gemma4": [(2, 8, 8), (2, 8, 8), (1, 16, 16)] * 2,
    "mimo": [(1, 12, 8), (2, 12, 8), (2, 12, 8), (2, 12, 8), (1, 12, 8)],
}
SLIDES = {"gemma4": [True, True, False] * 2, "mimo": [False, True, True, True, False]}


def made(family: str) -> PreTrainedModel:
    types = [WINDOW if slides else FULL for slides in SLIDES[family]]
    fields: dict[str, Any] = {"num_hidden_layers": len(types), "layer_types": types, "sliding_window": SLIDING}
    if family == "mimo":
        heads = {"num_key_value_heads": 1, "head_dim": 12, "v_head_dim": 8}
        return small("mimo_v2_flash", n_routed_experts=4, **heads, **fields)
    heads = {"num_global_key_value_heads": 1, "global_head_dim": 16, "attention_k_eq_v": True}
    inputs = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}
    return small("gemma4_text", **heads, **inputs, **fields)


@cache
def model_of(family: str) -> PreTrainedModel:
    return prepare(made(family))


def checkpoint_of(family: str) -> Checkpoint:
    return Checkpoint(ModelSpec(name=family), Path(), model_of(family).config, torch.float64, ())


def held(found: Any) -> list[list[int]]:
    """Tokens of the first sequence, by layer and KV head."""
    return [layer.kept_tokens()[0].tolist() for layer in found.attention_layers]


def alike(family: str, tokens: int) -> list[list[int]]:
    return [[tokens] * heads for heads, _, _ in SHAPES[family]]


@pytest.mark.parametrize("family", SHAPES)
def test_full_is_transformers_own_attention_and_text(family: str) -> None:
    model, ids = made(family), torch.tensor([prompt(60)])
    text = model.generate(ids, max_new_tokens=NEW, do_sample=False)[0, 60:].tolist()
    assert_full_is_eager(model)
    assert generate_tokens(model, ids, make_policy("full"), max_new_tokens=NEW).tokens[0] == text


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize(
    ("slug", "fields", "tokens"),
    [
        ("snapkv", {"window": 8}, BUDGET + NEW - 1),
        ("h2o", {}, BUDGET),
        ("tova", {}, BUDGET),
        ("caote_h2o", {"block": 8}, BUDGET),
        ("kivi", {"group": 4, "residual": 8}, 45 + NEW - 1),
        ("turboquant", {}, 45 + NEW - 1),
        ("quest", {"reader.page": 8}, 45 + NEW - 1),
    ],
)
def test_every_kv_head_holds_the_budget(family: str, slug: str, fields: dict[str, Any], tokens: int) -> None:
    done = generate_tokens(
        model_of(family), torch.tensor([prompt(45)]), make_policy(slug, BUDGET, **fields), max_new_tokens=NEW
    )
    assert held(done.cache) == alike(family, tokens)
    with pytest.raises(ValueError, match=r"^the layers have 1 to 2 KV heads, .* call kept_tokens\(\) of each layer"):
        done.cache.kept_tokens()


@pytest.mark.parametrize("family", SHAPES)
def test_heads_of_a_layer_share_its_slots_and_layers_their_mean(family: str) -> None:
    ids = torch.tensor([prompt(45)])
    for slug, fields in (
        ("ada_snapkv", {"window": 8}),
        ("pyramidkv", {"window": 8}),
        ("d2o", {}),
        ("cake", {"window": 8, "cascading": False}),
    ):
        kept = held(generate_tokens(model_of(family), ids, make_policy(slug, BUDGET, **fields), max_new_tokens=1).cache)
        means = [sum(heads) / len(heads) for heads in kept]
        assert sum(means) == BUDGET * len(kept)
        assert [heads for heads in kept if heads != [BUDGET] * len(heads)], slug
        if slug == "ada_snapkv":
            assert means == [BUDGET] * len(kept)


class SlowUnlike(SlowSequence):
    """The slow reference with the KV heads of Gemma 4's layers."""

    def __init__(self, rules: Rules, length: int) -> None:
        super().__init__(rules, len(SHAPES["gemma4"]), 1, 1, length)
        self.heads = [[Head(sums=[{} for _ in range(4 // n)]) for _ in range(n)] for n, _, _ in SHAPES["gemma4"]]

    def attend(self, layer: int, queries: Array, keys: Array, values: Array, glance: Glance) -> Array:
        self.group = 4 // len(self.heads[layer])
        return super().attend(layer, queries, keys, values, glance)


@pytest.mark.parametrize(
    "rules",
    [
        Rules("snapkv", 20, window=6),
        Rules("h2o", 20, block=8),
        Rules("tova", 20, "caote", block=16),
        Rules("tova", 20, block=16, order="evict_then_attend"),
    ],
)
def test_kept_tokens_and_text_equal_the_slow_oracle(rules: Rules) -> None:
    model, sequence = model_of("gemma4"), SlowUnlike(rules, 45)
    with attending(model, sequence):
        generate(model, prompt(45), 4, sequence)
    assert sequence.trace.margin() > 1e-6
    run = run_greedy(model, [prompt(45)], policy_for(rules), 4)
    assert run.tokens[0] == sequence.trace.tokens
    assert run.of_row(0) == sequence.trace.kept


def policies() -> list[Policy]:
    slugs = ("full", "snapkv", "ada_snapkv", "pyramidkv", "cake", "kivi_g4_r8")
    return [*(make_policy(slug, 36) for slug in slugs), make_policy("h2o", BUDGET, block=8)]


@pytest.mark.parametrize(("family", "every"), [("gemma4", 2), ("mimo", 3)])
def test_sequences_are_equal_alone_and_in_a_batch(family: str, every: int) -> None:
    assert_rows_alone(model_of(family), policies()[::every], (50, 37), NEW)


@pytest.mark.parametrize("family", SHAPES)
def test_bytes_are_a_hand_count_of_every_layer(family: str) -> None:
    """Keys and values in float64 beside a position in int32; transformers' layers that slide hold a window less one."""
    model, ids = made(family), torch.tensor([prompt(45)])
    theirs = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=theirs)
    pairs = zip(SHAPES[family], SLIDES[family], strict=True)
    full = sum(8 * heads * (SLIDING - 1 if slides else 45) * (key + value) for (heads, key, value), slides in pairs)
    assert full == sum(x.nbytes for layer in theirs.layers for x in (layer.keys, layer.values))
    assert checkpoint_of(family).full_cache_bytes(45) == full

    shape = from_config({**model.config.to_dict(), "dtype": "float32"})
    assert shape.own == tuple(SHAPES[family])
    for policy, tokens in ((make_policy("full"), 45), (make_policy("knorm", BUDGET), BUDGET)):
        found = KVCache(prepare(model).config, policy)
        with torch.no_grad():
            model(ids, past_key_values=found)
        kept = sum(heads * tokens * (8 * (key + value) + 4) for heads, key, value in SHAPES[family])
        assert found.held_nbytes == kept
        assert predict(policy, shape_in_float64(shape), 45).nbytes == found.held_nbytes
    snapkv = make_policy("snapkv", BUDGET, window=8)
    found = KVCache(model.config, snapkv)
    with torch.no_grad():
        model(ids, past_key_values=found)
    assert predict(snapkv, shape_in_float64(shape), 45).nbytes == found.held_nbytes  # its window of queries included


def shape_in_float64(shape: CacheShape) -> CacheShape:
    return CacheShape(**(vars(shape) | {"dtype": torch.float64}))
