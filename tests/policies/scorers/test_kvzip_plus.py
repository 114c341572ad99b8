"""KVzip+: scores from one plain forward pass, weighed by hand, and kvpress's own."""

import pytest
import torch
from kv_models import CodePoints, prompt, tiny
from kv_runs import kept_now
from kvpress_kept import kvzip_press_keeps
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvbench import make_policy
from kvbench.engine.generate import generate_tokens

LENGTH, BUDGET, SINKS, KV_HEADS, GROUP = 40, 16, 4, 2, 2
IDS = prompt(LENGTH)
WORDS = CodePoints()


def scores(model: PreTrainedModel) -> Tensor:
    """[L,H_kv,T] where the prompt is one chunk: what a softmax over it and its repetition leaves, weighed."""
    model.set_attn_implementation("eager")
    more = [*WORDS.encode("\n\nRepeat the previous context exactly."), *WORDS.encode("\n"), *IDS]
    given: dict[int, Tensor] = {}
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: given.update({module.layer_idx: kwargs["hidden_states"]}), with_kwargs=True
        )
        for layer in model.model.layers
    ]
    cache = DynamicCache(config=model.config)
    attentions = model(torch.tensor([[*IDS, *more]]), past_key_values=cache, output_attentions=True).attentions
    for hook in hooks:
        hook.remove()
    found = torch.zeros(len(attentions), KV_HEADS, LENGTH, dtype=torch.float64)
    for index, weights in enumerate(attentions):
        projection = model.model.layers[index].self_attn.o_proj.weight  # [hidden,H_q*D]
        for head in range(KV_HEADS * GROUP):
            own = projection[:, head * 8 : (head + 1) * 8]
            added = (cache.layers[index].values[0, head // GROUP, :LENGTH] @ own.T).norm(dim=-1)
            sizes = given[index][0, LENGTH:].norm(dim=-1)
            weighed = weights[0, head, LENGTH:, :LENGTH] * added / sizes[:, None]
            found[index, head // GROUP] = torch.maximum(found[index, head // GROUP], weighed.amax(0))
    return found


@torch.inference_mode()
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_weights_count_by_what_they_add_to_a_hidden_state(family: str) -> None:
    model = tiny(family)
    ranked = scores(model)
    ranked[..., :SINKS] = torch.inf
    cut = ranked.flatten().sort(descending=True).values[2 * KV_HEADS * BUDGET - 1]
    expected = [[tuple((head >= cut).nonzero().flatten().tolist()) for head in layer] for layer in ranked]
    model.set_attn_implementation("kvbench")
    done = generate_tokens(
        model, torch.tensor([IDS]), make_policy("kvzip_plus", BUDGET), max_new_tokens=1, encoder=WORDS
    )
    assert kept_now(done.cache)[0] == expected


@torch.inference_mode()
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_kept_sets_are_those_of_kvpress(family: str) -> None:
    how = {"kvzip_plus_normalization": True, "chunk_size": 24}
    expected = kvzip_press_keeps(family, IDS, 1 - BUDGET / LENGTH, **how)
    ours = tiny(family, dtype=torch.float32)
    ours.set_attn_implementation("kvbench")
    policy = make_policy("kvzip_plus", BUDGET, chunk=24)
    got = kept_now(generate_tokens(ours, torch.tensor([IDS]), policy, max_new_tokens=1, encoder=WORDS).cache)[0]
    assert [[list(head) for head in layer] for layer in got] == expected
