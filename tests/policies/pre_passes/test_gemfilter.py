"""GemFilter picks input tokens by one layer's raw products and lets the model start again on them."""

import pytest
import torch
from kv_models import tiny
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvbench import KVCache, make_policy
from kvbench.cache.hook import prepare
from kvbench.engine.generate import generate_tokens
from kvbench.policies.pre_passes.gemfilter import GemFilter


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny(layers=3, dtype=torch.float32)


def test_products_are_summed_over_heads_and_averaged_over_neighbours_by_hand() -> None:
    # Two query heads share one KV head: their sum is (1, 1), so products are 0 3 0 0 6 0, zeros outside.
    query = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    keys = torch.tensor([[[0.0, 0], [1, 2], [0, 0], [1, -1], [6, 0], [0, 0]]])
    assert GemFilter(kernel=1).choose(query, keys, 2).tolist() == [1, 4]
    # pooled by 3: 1 1 1 2 2 2
    assert GemFilter(kernel=3).choose(query, keys, 3).tolist() == [3, 4, 5]
    assert GemFilter(kernel=3).choose(query, keys, 4).tolist() == [0, 3, 4, 5], "a tie goes to the lower position"
    assert GemFilter(kernel=3).choose(query, keys, 99).tolist() == [0, 1, 2, 3, 4, 5]


@torch.no_grad()
def test_the_model_starts_again_on_the_tokens_its_early_layer_chose(model: PreTrainedModel) -> None:
    ids = torch.randint(1, 301, (1, 40), generator=torch.Generator().manual_seed(1))
    caught: dict[str, torch.Tensor] = {}
    model.set_attn_implementation("eager")
    attention = model.model.layers[1].self_attn
    hook = attention.q_proj.register_forward_pre_hook(lambda _, args: caught.update(hidden=args[0].detach()))
    model(ids)
    hook.remove()

    hidden = caught["hidden"]
    query, key = (proj(hidden).view(1, 40, -1, 8).transpose(1, 2) for proj in (attention.q_proj, attention.k_proj))
    query, key = apply_rotary_pos_emb(query, key, *model.model.rotary_emb(hidden, torch.arange(40)[None]))
    products = torch.stack([query[0, h, -1] @ key[0, h // 2].T for h in range(4)]).sum(0)
    padded = torch.cat([torch.zeros(2), products, torch.zeros(2)])
    pooled = torch.stack([padded[i : i + 5].mean() for i in range(40)])
    chosen = sorted(sorted(range(40), key=lambda i: -float(pooled[i]))[:12])
    expected = model.generate(ids[:, chosen], max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)

    got = generate_tokens(prepare(model), ids, make_policy("gemfilter", 12, layer=1), max_new_tokens=6)
    assert got.tokens[0] == expected[0, 12:].tolist()
    assert got.cache.kept_tokens().unique().tolist() == [12 + 5]


def test_a_prompt_within_the_budget_is_left_alone(model: PreTrainedModel) -> None:
    ids = torch.randint(1, 301, (1, 12), generator=torch.Generator().manual_seed(2))
    runs = [generate_tokens(prepare(model), ids, policy, max_new_tokens=4).tokens for policy in
            (make_policy("gemfilter", 12, layer=1), make_policy("full"))]  # fmt: skip
    assert runs[0] == runs[1]


def test_what_cannot_be_filtered_is_refused_in_one_sentence(model: PreTrainedModel) -> None:
    policy = make_policy("gemfilter", 12, layer=1)
    with pytest.raises(ValueError, match=r"use kvbench\.generate"):
        KVCache(model.config, policy)
    with pytest.raises(ValueError, match=r"^gemfilter filters at layer 13, the model has attention layers 0 to 2$"):
        generate_tokens(
            prepare(model), torch.ones(1, 20, dtype=torch.long), make_policy("gemfilter", 12), max_new_tokens=1
        )
    with pytest.raises(ValueError, match="needs a budget"):
        make_policy("gemfilter")
