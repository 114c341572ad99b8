"""Turns of a conversation on one cache: each prompt is compressed at its end, and the promise holds over them all."""

from functools import cache
from typing import Any

import pytest
import torch
from kv_models import CodePoints, prompt, tiny
from kv_presets import kinds
from kv_runs import kept_now
from parameters import few_fast
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvbench import KVCache, make_policy
from kvbench.cache.hook import prepare
from kvbench.cache.pre_passes import rate
from kvbench.engine.pre_pass import pre_pass
from kvbench.engine.prefill import prefill
from kvbench.policies.policy import Policy
from kvbench.policies.pre_passes.surprisal import surprisal

LAYERS, KV_HEADS, BUDGET = 2, 2, 40
TURNS, ANSWER = (56, 21, 70), 5  # a long prompt, one shorter than most windows, one that is long again
LENGTH = sum(TURNS) + len(TURNS) * ANSWER
SMALL: dict[str, dict[str, Any]] = {"zipcache": {"gap": 10}, "gear": {"gap": 10, "group": 8}}


@cache
def model() -> PreTrainedModel:
    return prepare(tiny(kv_heads=KV_HEADS, layers=LAYERS))


def built(slug: str, budget: float = BUDGET, **fields: Any) -> Policy:
    if slug in ("kivi", "ott", "kcvc"):
        fields |= {"group": 8, "residual": 8}
    return make_policy(slug, budget, **SMALL.get(slug, {}), **fields)


def conversation(held: KVCache, ids: Tensor, chunks: int = 1) -> Tensor:
    """All logits [LENGTH,V] of a conversation of given tokens [1,LENGTH]; audited whenever a prompt is in."""
    out, start = [], 0
    for turn, length in enumerate(TURNS):
        if turn:
            held.next_prompt(length, question=length - 5)
        sizes = [length // chunks] * (chunks - 1)
        for size in [*sizes, length - sum(sizes), *[1] * ANSWER]:
            new = ids[:, start : start + size]
            if held.policy.pre_pass is not None and size > 1:
                prefill(model(), new, held, CodePoints())
                out.append(torch.zeros(size, 1))
            else:
                rate(held.sequence, torch.zeros(1, 2), torch.zeros(1, 1, dtype=torch.long))
                out.append(model()(new, past_key_values=held).logits[0])
            start += size
            held.audit()
    return torch.cat(out) if held.policy.pre_pass is None else torch.empty(0)


@torch.inference_mode()
@pytest.mark.parametrize("slug", few_fast(kinds(), kinds()[::2], pytest.mark.slow("runs every kind")))
def test_every_prompt_of_a_conversation_is_brought_to_the_budget(slug: str) -> None:
    policy = built(slug)
    held = KVCache(model().config, policy, TURNS[0], question=TURNS[0] - 5)
    conversation(held, torch.tensor([prompt(LENGTH)]))
    grown = ANSWER if policy.schedule.decode == "grow" else min(ANSWER, policy.schedule.every - 1)
    kept = held.kept_tokens()[:, 0].float()
    per_layer = kept.mean(-1) if policy.allocator.per_head else kept.amax(-1)
    assert held.seen == LENGTH
    assert float(per_layer.sum()) <= LAYERS * (BUDGET + grown + (not policy.allocator.exact))
    assert float(per_layer.sum()) >= LAYERS * BUDGET - 2 * LAYERS  # and it is used


@torch.inference_mode()
@pytest.mark.parametrize("slug", ["d2o", "cake_int8"])
def test_layers_that_kept_unlike_numbers_of_tokens_share_the_budget_of_the_next_prompt(slug: str) -> None:
    """Also where they hold codes."""
    own = prepare(tiny(layers=4))
    held, ids = KVCache(own.config, make_policy(slug, BUDGET, decode="evict"), TURNS[0]), torch.tensor([prompt(114)])
    own(ids[:, :56], past_key_values=held)
    before = held.kept_tokens()[:, 0, 0].tolist()
    assert len(set(before)) > 2
    assert sum(before) == 4 * BUDGET
    held.next_prompt(58)
    own(ids[:, 56:], past_key_values=held)
    held.audit()
    assert held.kept_tokens()[:, 0].sum(0).tolist() == [4 * BUDGET] * KV_HEADS


# what the second prompt's eviction is, by hand


@torch.inference_mode()
def test_a_window_keeps_its_sinks_and_the_newest_of_the_conversation() -> None:
    held = KVCache(model().config, make_policy("streamingllm", 16, sinks=4))
    conversation(held, torch.tensor([prompt(LENGTH)]))
    expected = (0, 1, 2, 3, *range(LENGTH - 12, LENGTH))
    assert kept_now(held) == [[[expected] * KV_HEADS] * LAYERS]


@torch.inference_mode()
@pytest.mark.parametrize(("slug", "fields"), [("snapkv", {"window": 6, "pool": "none"}), ("tova", {})])
def test_the_second_prompts_window_scores_kept_tokens_of_the_first(slug: str, fields: dict[str, Any]) -> None:
    """Layer 0, whose keys depend on nothing: softmax over the stored keys, summed over the window and the group."""
    held = KVCache(model().config, make_policy(slug, 16, decode="grow", **fields))
    ids = torch.tensor([prompt(52)])
    model()(ids[:, :30], past_key_values=held)
    before = kept_now(held)[0][0]
    for t in (30, 31):
        model()(ids[:, t : t + 1], past_key_values=held)
    held.next_prompt(20)
    model()(ids[:, 32:], past_key_values=held)
    window = fields.get("window", 1)
    queries, keys = first_layer(ids)
    for head, kept in enumerate(kept_now(held)[0][0]):
        stored = [*before[head], *range(30, 52)]
        scores = dict.fromkeys(stored, 0.0)
        for query in range(2 * head, 2 * head + 2):
            for t in range(52 - window, 52):
                seen = [p for p in stored if p <= t]
                rows = (keys[head, seen] @ queries[query, t] * keys.shape[-1] ** -0.5).softmax(-1)
                for p, weight in zip(seen, rows.tolist(), strict=True):
                    scores[p] += weight
        always = list(range(52 - window, 52)) if slug == "snapkv" else []
        others = sorted((p for p in stored if p not in always), key=lambda p: -scores[p])
        assert kept == tuple(sorted([*always, *others[: 16 - len(always)]]))


def first_layer(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Rotated queries [H_q,T,D] and keys [H_kv,T,D] of layer 0."""
    running = model()
    layer = running.model.layers[0]
    x = layer.input_layernorm(running.model.embed_tokens(ids))
    q, k = (
        project(x).view(*ids.shape, -1, 8).transpose(1, 2)
        for project in (layer.self_attn.q_proj, layer.self_attn.k_proj)
    )
    cos, sin = running.model.rotary_emb(x, torch.arange(ids.shape[1])[None])
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    return q[0], k[0]


@torch.inference_mode()
def test_generate_takes_turns() -> None:
    """Of the whole conversation's ids `generate` feeds what the cache has not seen."""
    policy = make_policy("snapkv", 16, window=6)
    held = KVCache(model().config, policy)
    ids = torch.tensor([prompt(30)])
    ids = model().generate(ids, past_key_values=held, max_new_tokens=4, do_sample=False)
    ids = torch.cat([ids, torch.tensor([prompt(20, seed=3)])], dim=1)
    held.next_prompt(ids.shape[1] - held.seen)
    ids = model().generate(ids, past_key_values=held, max_new_tokens=4, do_sample=False)
    assert held.seen == ids.shape[1] - 1 == 30 + 4 + 20 + 3
    assert held.kept_tokens().tolist() == [[[16 + 3] * KV_HEADS]] * LAYERS
    assert all(set(range(30 + 4 + 20 - 6, held.seen)) <= set(head) for layer in kept_now(held)[0] for head in layer)


# refusals


@pytest.mark.parametrize("slug", ["snapkv_kivi_g32_r128", "cake_kivi_g32_r128"])
def test_a_quantized_prompt_cannot_be_evicted_from_again(slug: str) -> None:
    held = KVCache(model().config, make_policy(slug, 40, decode="grow"))
    with pytest.raises(ValueError, match=r"stores a prompt in a compressed form from which no token can be evicted"):
        held.next_prompt(10)


@torch.inference_mode()
def test_surprisal_of_a_later_prompt_decides_the_kept_tokens() -> None:
    held = KVCache(model().config, make_policy("sirllm", 12, sinks=2))
    ids = torch.tensor([prompt(50)])
    prefill(model(), ids[:, :30], held)
    first = kept_now(held)[0][0][0]
    held.next_prompt(20)
    prefill(model(), ids[:, 30:], held)
    whole = model()(ids[:, :30], past_key_values=KVCache(model().config, make_policy("full"))).logits
    told = surprisal(whole[:, :-1], ids[:, 1:30])[0].tolist()
    scores = {p: told[p - 1] for p in first if p}
    # What the second prompt's tokens were expected with depends on the compressed first one.
    again = KVCache(model().config, make_policy("sirllm", 12, sinks=2))
    prefill(model(), ids[:, :30], again)
    again.next_prompt(20)
    with pre_pass(model(), again, ids[:, 30:]):
        later = model()(ids[:, 30:], past_key_values=again).logits
    scores |= {30: 0.0}
    scores |= dict(zip(range(31, 50), surprisal(later[:, :-1], ids[:, 31:])[0].tolist(), strict=True))
    others = sorted((p for p in scores if p >= 2), key=lambda p: -scores[p])[:10]
    assert kept_now(held)[0] == [[tuple(sorted([0, 1, *others]))] * KV_HEADS] * LAYERS
