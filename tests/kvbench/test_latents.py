"""Latent attention: latents are stored and evicted, kept sets and logits are those of transformers' own cache, cut.

The reference knows nothing of kvbench: it feeds transformers' eager attention step by step, reads the attention weights
that it returns, chooses by the published rules, and cuts the latents that transformers' cache holds.

Letters: H query heads, m queries of a step, n held tokens, V numbers of a value.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from kv_crafted import drawn, observed
from kv_models import VOCABULARY, prompt
from kv_runs import assert_rows_alone
from torch import Tensor
from torch.nn import functional as F
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from kvbench import KVCache, make_policy
from kvbench.engine.generate import generate_tokens
from kvbench.models.cache_shapes import from_config
from kvbench.models.files import ModelSpec
from kvbench.models.loading import Checkpoint
from kvbench.policies.latents import LatentObservation
from kvbench.policies.policy import Policy
from kvbench.run.run import check_shapes
from kvbench.tools.cache_bytes import predict

FAMILIES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3", "axk1", "youtu")
RANK, ROTATED, HEADS, LAYERS = 12, 4, 3, 2
LENGTH, NEW, BUDGET, WINDOW = 48, 6, 20, 8
IDS = torch.tensor([prompt(LENGTH)])
NEAR = {"rtol": 0, "atol": 1e-4}  # eager attention takes its softmax in float32
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 30,
    "intermediate_size": 24,
    "moe_intermediate_size": 12,
    "expert_ffn_hidden_size": 12,
    "ffn_hidden_size": 24,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "q_lora_rank": 16,
    "kv_lora_rank": RANK,
    "qk_rope_head_dim": ROTATED,
    "qk_nope_head_dim": 6,
    "v_head_dim": 10,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "zero_expert_num": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "initializer_range": 0.3,
    **dict.fromkeys(("bos_token_id", "eos_token_id"), None),
    "pad_token_id": 0,
}


@cache
def tiny(
    family: str = "deepseek_v3", attention: str = "kvbench", dtype: torch.dtype = torch.float64
) -> PreTrainedModel:
    """A random model, its attention peaked."""
    kind = CONFIG_MAPPING[family]
    known = kind().to_dict().keys()
    sizes = {name: value for name, value in SIZES.items() if name in known}
    if family == "longcat_flash":  # two attentions a layer
        sizes |= {"num_layers": LAYERS // 2, "head_dim": ROTATED}
    else:
        sizes |= {"num_hidden_layers": LAYERS}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**sizes), experts_implementation="eager").to(dtype).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn_like(weight)
    model.set_attn_implementation(attention)
    return model


# --- the slow reference ----------------------------------------------------------------------------------------------
class Layer:
    """What a reference knows of a layer after a step: positions held, weights [H,m,n], their sums, keys and values."""

    def __init__(self) -> None:
        self.held: list[int] = []
        self.sums = torch.zeros(0, dtype=torch.float64)

    def step(self, new: range, weights: Tensor, expanded: tuple[Tensor, Tensor]) -> None:
        self.held += new
        self.weights, (self.keys, self.values) = weights, expanded
        self.sums = F.pad(self.sums, (0, len(new))) + weights.mean(0).sum(0)

    def keep(self, slots: list[int]) -> None:
        self.held, self.sums = [self.held[slot] for slot in slots], self.sums[slots]


def snapkv(layer: Layer) -> Tensor:
    drawn = layer.weights[:, -WINDOW:].sum(1).mean(0)
    pooled = F.max_pool1d(drawn[None, :-WINDOW], 7, stride=1, padding=3)[0]
    return F.pad(pooled, (0, WINDOW), value=float("inf"))


def h2o(layer: Layer) -> Tensor:
    scores = layer.sums.clone()
    scores[-(BUDGET // 2) :] = float("inf")
    return scores


def tova(layer: Layer) -> Tensor:
    return layer.weights[:, -1].mean(0)


def knorm(layer: Layer) -> Tensor:
    return -layer.keys.norm(dim=-1).mean(0)


def streamingllm(layer: Layer) -> Tensor:
    return torch.tensor([float("inf") if place < 4 else float(place) for place in layer.held])


def caote_tova(layer: Layer) -> Tensor:
    """The error of all heads' outputs side by side, had a token not been there: alpha / (1 - alpha) |X - v|."""
    alpha = tova(layer) / tova(layer).sum()
    values = torch.cat(list(layer.values), dim=-1)  # [n,H*V]
    return alpha / (1 - alpha) * (alpha @ values - values).norm(dim=-1)


RULES: dict[str, Callable[[Layer], Tensor]] = {
    rule.__name__: rule for rule in (snapkv, h2o, tova, knorm, streamingllm, caote_tova)
}


@torch.inference_mode()
def reference(
    rule: Callable[[Layer], Tensor] | None, ids: list[int], steps: Sequence[int], new: int, evicts: bool
) -> tuple[Tensor, list[list[int]]]:
    """Logits [new,V] of the tokens generated after ids, and the positions that every layer holds in the end.

    steps: lengths of the prompt's parts, after each of which the budget holds; tokens that follow them are given, and,
    as the generated ones, evict one for one where `evicts`.
    """
    model = tiny(attention="eager")
    readers = [module for module in model.modules() if hasattr(module, "expand_kv")]
    own, layers, logits = DynamicCache(config=model.config), [Layer() for _ in readers], []
    bounds = list(accumulate(steps, initial=0))
    prompts = len(bounds) - 1
    bounds += range(bounds[-1] + 1, len(ids) + new)
    for number, (first, end) in enumerate(pairwise(bounds)):
        if first == len(ids):
            ids = [*ids, int(logits[-1].argmax())]
        out = model(
            input_ids=torch.tensor([ids[first:end]]),
            position_ids=torch.arange(first, end)[None],
            past_key_values=own,
            output_attentions=True,
        )
        if end >= len(ids):
            logits.append(out.logits[0, -1])
        for layer, stored, reader, weights in zip(layers, own.layers, readers, out.attentions, strict=True):
            keys, values = reader.expand_kv(stored.keys, stored.values)
            layer.step(range(first, end), weights[0], (keys[0], values[0]))
            if rule is not None and (number < prompts or evicts) and len(layer.held) > BUDGET:
                slots = sorted(rule(layer).argsort(descending=True, stable=True)[:BUDGET].tolist())
                layer.keep(slots)
                stored.keys, stored.values = stored.keys[:, :, slots], stored.values[:, :, slots]
    return torch.stack(logits), [layer.held for layer in layers]


def policy_of(slug: str, **more: Any) -> Policy:
    return make_policy(slug, BUDGET, **({"window": WINDOW} if slug == "snapkv" else {}), **more)


def positions(found: KVCache) -> list[list[int]]:
    """Held by every layer, ascending; one head for all."""
    assert all(layer.positions.shape[:2] == (1, 1) for layer in found.attention_layers)
    return [sorted(p for p in layer.positions[0, 0].tolist() if p >= 0) for layer in found.attention_layers]


@torch.inference_mode()
def decoded(found: KVCache, calls: Sequence[Tensor], new: int) -> Tensor:
    """Logits [new,V] of tokens generated after calls [1,m] of the model."""
    for ids in calls:
        logits = [tiny()(input_ids=ids, past_key_values=found).logits[0, -1]]
    while len(logits) < new:
        token = logits[-1].argmax()[None, None]
        logits.append(tiny()(input_ids=token, past_key_values=found).logits[0, -1])
    return torch.stack(logits)


def cases() -> Iterator[tuple[str, int | None, str]]:
    for slug in RULES:
        yield from ((slug, block, "grow") for block in (None, 16))
        if slug != "snapkv":  # it looks again through queries of tokens before, which transformers does not hand out
            yield from ((slug, block, "evict") for block in (None, 16))


@pytest.mark.parametrize(("slug", "block", "decode"), list(cases()))
def test_kept_latents_and_logits_are_those_of_transformers_cache_cut_by_hand(
    slug: str, block: int | None, decode: str
) -> None:
    schedule = {} if block is None else {"schedule": "blocks", "block": block}
    found = KVCache(tiny().config, policy_of(slug, decode=decode, **schedule), prompt_length=LENGTH)
    logits = decoded(found, [IDS], NEW)
    steps = [LENGTH] if block is None else [block] * (LENGTH // block)
    expected, held = reference(RULES[slug], IDS[0].tolist(), steps, NEW, decode == "evict")
    assert positions(found) == held
    torch.testing.assert_close(logits, expected, **NEAR)
    found.audit()


@pytest.mark.parametrize("family", FAMILIES)
def test_full_gives_the_logits_and_latents_of_transformers(family: str) -> None:
    own, found = DynamicCache(config=tiny(family).config), KVCache(tiny(family).config, make_policy("full"))
    calls = [IDS[:, :-2], IDS[:, -2:-1], IDS[:, -1:]]
    with torch.inference_mode():
        expected = [tiny(family, "eager")(input_ids=ids, past_key_values=own).logits for ids in calls]
        logits = [tiny(family)(input_ids=ids, past_key_values=found).logits for ids in calls]
    torch.testing.assert_close(torch.cat(logits, dim=1), torch.cat(expected, dim=1), **NEAR)
    for layer, theirs in zip(found.layers, own.layers, strict=True):
        torch.testing.assert_close((layer.keys, layer.values), (theirs.keys, theirs.values), **NEAR)
    latents = LAYERS * LENGTH * (RANK + ROTATED) * 8
    assert found.held_nbytes == latents + LAYERS * LENGTH * 4  # and the positions
    checkpoint = Checkpoint(ModelSpec(name=family, path="."), Path(), tiny(family).config, torch.float64, ())
    assert checkpoint.full_cache_bytes(LENGTH) == latents
    assert checkpoint.full_position_bytes(LENGTH) == LAYERS * LENGTH * 4


@pytest.mark.parametrize("slug", RULES)
def test_a_context_is_compressed_before_its_question(slug: str) -> None:
    done = generate_tokens(tiny(), IDS, policy_of(slug, decode="grow"), max_new_tokens=NEW, context_tokens=LENGTH - 9)
    expected, held = reference(RULES[slug], IDS[0].tolist(), [LENGTH - 9], NEW, evicts=False)
    assert positions(done.cache) == held
    assert done.tokens == [expected.argmax(-1).tolist()]


EVERY = [
    make_policy("full"),
    *(policy_of(slug, decode="evict") for slug in RULES),
    policy_of("tova", decode="grow"),
    make_policy("snapkv", 30, window=WINDOW, schedule="blocks", block=16),
    make_policy("caote_h2o", BUDGET, **{"value.gqa": "group_l2"}),
    make_policy("tova", BUDGET, granularity="layer"),
    *(make_policy(slug, BUDGET) for slug in ("roco", "keydiff", "rkv", "random", "critical_tova")),
    *(make_policy(slug, BUDGET, window=WINDOW) for slug in ("cake", "pyramidkv")),
]


@pytest.mark.parametrize("some", [EVERY[::2], pytest.param(EVERY[1::2], marks=pytest.mark.slow("runs all policies"))])
def test_sequences_of_several_policies_share_a_prefill_and_are_equal_alone(some: list[Policy]) -> None:
    assert_rows_alone(tiny(), some, (LENGTH, 37), NEW)


def test_the_largest_head_of_a_layer_with_one_token_set_is_the_mean_of_all() -> None:
    """K-VEC reads it where a kernel sums the window up."""
    queries, keys, _ = drawn(20, HEADS, HEADS)
    recent = {"recent_queries": queries[:, :, -WINDOW:], "recent_positions": torch.arange(20 - WINDOW, 20)[None]}
    seen = observed(keys, queries, positions=torch.arange(20).expand(1, 1, -1), **recent)
    latent = LatentObservation(**{field.name: getattr(seen, field.name) for field in fields(seen) if field.init})
    rows = (queries @ keys.mT).masked_fill(torch.ones(20, 20).triu(1).bool(), -torch.inf).softmax(-1)
    torch.testing.assert_close(latent.window_largest(WINDOW), rows[:, :, -WINDOW:].mean(1).sum(1))


@pytest.mark.parametrize("slug", ["full", "snapkv", "h2o", "caote_tova"])
def test_predicted_bytes_are_the_measured_ones(slug: str) -> None:
    policy, model = policy_of(slug, decode="evict"), tiny(dtype=torch.float32)
    found = KVCache(model.config, policy, prompt_length=LENGTH)
    with torch.inference_mode():
        model(input_ids=IDS, past_key_values=found)
    shape = from_config(model.config.to_dict() | {"dtype": "float32"})
    assert shape.stored == (RANK, ROTATED)
    assert predict(policy, shape, LENGTH).nbytes == found.held_nbytes


@pytest.mark.parametrize(
    ("slug", "how", "why"),
    [
        ("kivi", {}, "compresses stored keys and values"),
        ("d2o_no_layer", {}, "merges keys and values"),
        ("ada_snapkv", {}, "has a separate budget for each head"),
        ("snapkv", {"granularity": "query_head"}, "keeps a token set for each query head"),
        ("quest", {}, "uses sparse attention"),
        ("expected_attention", {}, "reads unrotated keys"),
        ("streamingllm", {"schedule.rerotate": True}, "rotates kept keys to new positions"),
        ("noncausal", {}, "keeps statistics of every key"),
    ],
)
def test_policies_without_support_for_latents_are_refused_at_once(slug: str, how: dict[str, Any], why: str) -> None:
    policy = make_policy(slug, 64, **how)
    with pytest.raises(ValueError, match=f"^{slug} {why}.*, but this model's cache stores latents"):
        KVCache(tiny().config, policy)
    with pytest.raises(ValueError, match=why):
        check_shapes(policy, Checkpoint(ModelSpec(name="tiny"), Path(), tiny().config, torch.float64, ()))
