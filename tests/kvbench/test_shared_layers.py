"""Layers that read what an earlier layer stored: what they read, when it is evicted, and that it is counted once."""

from functools import cache
from typing import Any

import pytest
import torch
from kv_models import SHARING, prompt, tiny
from kv_oracle import Rules
from kv_runs import assert_full_is_eager, assert_rows_alone, policy_for, run_greedy
from kv_simulate import simulate
from torch import Tensor
from transformers import PreTrainedModel

from kvbench import KVCache, make_policy
from kvbench.cache.copies import fork
from kvbench.cache.hook import prepare
from kvbench.engine.generate import generate_tokens
from kvbench.policies.needs import Needs
from kvbench.policies.observation import Observation, State
from kvbench.policies.policy import Policy
from kvbench.policies.scorers.scorer import Scorer

OWNERS = {3: 2, 4: 0}
NEW = 6


@cache
def model_of(family: str) -> PreTrainedModel:
    return prepare(tiny(family))


@pytest.mark.parametrize("family", SHARING)
def test_full_is_the_familys_eager_attention_beyond_its_window(family: str) -> None:
    assert_full_is_eager(tiny(family))


@pytest.mark.parametrize(
    ("family", "rules"),
    [
        ("gemma3n", Rules("snapkv", 20, window=6)),
        ("gemma4", Rules("h2o", 20, block=8)),
        ("gemma4", Rules("tova", 20, "caote", block=16)),
        ("gemma4", Rules("tova", 20, block=16, order="evict_then_attend")),
    ],
)
def test_kept_tokens_and_text_equal_the_slow_oracle(family: str, rules: Rules) -> None:
    """Readers see what the owner's queries saw."""
    trace = simulate(model_of(family), prompt(45), 4, rules, OWNERS)
    assert trace.margin() > 1e-6
    run = run_greedy(model_of(family), [prompt(45)], policy_for(rules), 4)
    assert run.tokens[0] == trace.tokens
    assert run.of_row(0) == [layers[:3] for layers in trace.kept]


def policies() -> list[Any]:
    slugs = ("full", "snapkv", "ada_snapkv", "pyramidkv", "cake", "kivi_g8_r8", "kvzip", "sirllm")
    several = [make_policy("h2o", 24, block=8), make_policy("quest", 16), make_policy("tova", 24)]
    several += [make_policy("snapkv", 36, window=16, decode="evict")]
    return [*(make_policy(slug, 36) for slug in slugs), *several]


@pytest.mark.parametrize(
    ("family", "every"),
    [("gemma3n", 3), ("gemma4", 2), pytest.param("gemma4", 1, marks=pytest.mark.slow("runs all of its policies"))],
)
def test_sequences_are_equal_alone_and_in_a_batch(family: str, every: int) -> None:
    """One prefill for whole prompts, one batch for blocks, one of all that decodes; pre-passes and readers too."""
    assert_rows_alone(model_of(family), policies()[::every], (50, 37), NEW)


def test_a_store_that_is_read_three_times_is_counted_once() -> None:
    """Three stores of 45 tokens: 2 KV heads, keys and values in float64, positions in int32; Gemma 4's full layer has
    16 numbers a head, its others 8.
    """
    model = model_of("gemma4")
    cache = generate_tokens(model, torch.tensor([prompt(45)]), make_policy("full"), max_new_tokens=1).cache
    assert isinstance(cache, KVCache)
    assert cache.held_nbytes == 2 * 45 * (2 * 8 * (16 + 8 + 8) + 3 * 4)


def test_shared_layers_work_with_later_prompts_copies_and_contexts() -> None:
    model, policy = model_of("gemma4"), make_policy("snapkv", 20, window=6)
    first, second = torch.tensor([prompt(45, 1)]), torch.tensor([prompt(30, 2)])
    cache = KVCache(model.config, policy)
    with torch.no_grad():
        model(first, past_key_values=cache)
        again = fork(cache)
        for one in (cache, again):
            one.next_prompt(30)
        logits, its = (model(second, past_key_values=one).logits for one in (cache, again))
    torch.testing.assert_close(logits, its, atol=0, rtol=0)
    assert torch.equal(cache.kept_tokens(), torch.full((3, 1, 2), 20))
    whole = torch.cat([first, second], dim=1)
    asked = generate_tokens(model, whole, policy, max_new_tokens=NEW, context_tokens=45)
    grown = generate_tokens(model, whole, make_policy("full"), max_new_tokens=NEW, context_tokens=45)
    plain = generate_tokens(model, whole, make_policy("full"), max_new_tokens=NEW)
    assert grown.tokens == plain.tokens
    assert isinstance(asked.cache, KVCache)
    assert torch.equal(asked.cache.kept_tokens(), torch.full((3, 1, 2), 20 + 30 + NEW - 1))  # it grows


class ByHidden(Scorer):
    """Scores a token by the mean of its hidden state before the attention of the layer."""

    needs = Needs(hidden=True, layer=True)

    def score(self, observation: Observation, state: State) -> Tensor:
        return observation.shared["hidden"].mean(-1)[:, None].expand(observation.positions.shape)


@pytest.mark.parametrize("family", SHARING)
def test_a_layer_that_others_read_is_scored_by_its_own_hidden_states(family: str) -> None:
    """Its eviction waits for the readers, whose attention has other inputs."""
    model, inputs = model_of(family), dict[int, Tensor]()

    def note(module: Any, args: object, kwargs: dict[str, Tensor]) -> None:
        inputs[module.layer_idx] = kwargs["hidden_states"][0]

    modules = [module for module in model.modules() if type(module).__name__.endswith("Attention")]
    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in modules]
    policy = Policy(scorer=ByHidden(), budget=20)
    cache = generate_tokens(model, torch.tensor([prompt(45)]), policy, max_new_tokens=1).cache
    for hook in hooks:
        hook.remove()
    assert isinstance(cache, KVCache)
    for layer, held in enumerate(cache.attention_layers):
        best = inputs[layer].mean(-1).topk(20).indices.sort().values
        assert (held.positions == best).all()
