"""Allocators that set the budget by themselves: lazy layers (SimLayerKV) and streaming heads (DuoAttention)."""

import json
from pathlib import Path

import pytest
import torch
from kv_models import prompt, tiny
from kv_runs import run_greedy
from transformers import PreTrainedModel

from kvbench import make_policy
from kvbench.engine.generate import generate_tokens
from kvbench.errors import ConfigError
from kvbench.policies.policy import Policy

SINKS, RECENT, LENGTH, NEW = 2, 6, 30, 4
NEAR = [*range(SINKS), *range(LENGTH - RECENT, LENGTH)]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny(kv_heads=2)


def lazy(threshold: float) -> Policy:
    fields = {"scorer.sinks": SINKS, "allocator.sinks": SINKS, "allocator.recent": RECENT}
    return make_policy("simlayerkv", threshold=threshold, **fields)


def kept(model: PreTrainedModel, policy: Policy) -> list[list[list[int]]]:
    """Positions of the prompt that every head of every layer keeps at the end."""
    cache = run_greedy(model, [prompt(LENGTH)], policy, NEW).cache
    heads = [[head.tolist() for head in layer.positions[0]] for layer in cache.layers]
    assert all(sum(p >= LENGTH for p in head) == NEW - 1 for layer in heads for head in layer)
    return [[sorted(p for p in head if 0 <= p < LENGTH) for head in layer] for layer in heads]


def attention_to_near(model: PreTrainedModel) -> list[float]:
    """The share of the last query's attention that sinks and recent tokens get, by layer: the model's own attention."""
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        out = model(torch.tensor([prompt(LENGTH)]), output_attentions=True)
    return [float(layer[0, :, -1, NEAR].sum(-1).mean()) for layer in out.attentions]


def test_the_layers_that_look_at_little_else_keep_sinks_and_recent_tokens(model: PreTrainedModel) -> None:
    shares = attention_to_near(model)
    assert shares[0] != shares[1]
    between = sum(shares) / 2
    expected = [[NEAR if share > between else list(range(LENGTH))] * 2 for share in shares]
    assert kept(model, lazy(between)) == expected
    assert kept(model, lazy(0.0)) == [[NEAR] * 2] * 2
    assert kept(model, lazy(1.0)) == [[list(range(LENGTH))] * 2] * 2


def duo(folder: Path, scores: list[list[float]], **fields: float) -> Policy:
    file = folder / "scores.json"
    file.write_text(json.dumps({f"{i}-{h}": [score] for i, row in enumerate(scores) for h, score in enumerate(row)}))
    own = {"allocator.sinks": SINKS, "allocator.recent": RECENT, "scorer.sinks": SINKS}
    return make_policy("duoattention", importance=str(file), **own, **fields)


@pytest.mark.parametrize(("sparsity", "streaming"), [(0.5, {(0, 1), (1, 1)}), (0.25, {(1, 1)}), (0.0, set())])
def test_the_heads_of_lowest_score_keep_sinks_and_recent_tokens(
    model: PreTrainedModel, tmp_path: Path, sparsity: float, streaming: set[tuple[int, int]]
) -> None:
    policy = duo(tmp_path, [[0.9, 0.3], [0.8, 0.1]], sparsity=sparsity)
    everything = list(range(LENGTH))
    expected = [[NEAR if (layer, head) in streaming else everything for head in (0, 1)] for layer in (0, 1)]
    assert kept(model, policy) == expected


def test_scores_of_other_heads_are_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has 4 heads per layer, but the model has 2 KV heads"):
        generate_tokens(
            model, torch.tensor([prompt(LENGTH)]), duo(tmp_path, [[0.9, 0.3, 0.2, 0.1]] * 2), max_new_tokens=1
        )
    with pytest.raises(ConfigError, match="must be the path of a JSON file with scores per head"):
        make_policy("duoattention")


def test_a_prompt_shorter_than_sinks_and_recent_tokens_is_not_evicted(model: PreTrainedModel, tmp_path: Path) -> None:
    file = tmp_path / "scores.json"
    file.write_text(json.dumps({f"{i}-{h}": [1.0 + h] for i in range(2) for h in range(2)}))
    assert kept(model, make_policy("duoattention", importance=str(file))) == [[list(range(LENGTH))] * 2] * 2
