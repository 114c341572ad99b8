"""Rotations that depend on length: a prompt in blocks is rotated as one call of transformers rotates it."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from kv_models import generated, left_padded, prompt, small
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import kvbench
from kvbench import KVCache, make_policy
from kvbench.cache.families import AGAIN, layout_of
from kvbench.engine.prefill import prefill
from kvbench.engine.teacher_forcing import text_scores

SHORT, NEW = 32, 6
KINDS = ["longrope", "dynamic"]


@cache
def model(kind: str) -> PreTrainedModel:
    """A random model trained, as it were, on 32 tokens."""
    rope: dict[str, Any] = {"rope_theta": 10000.0, "rope_type": kind}
    if kind == "dynamic":
        return small("llama", max_position_embeddings=SHORT, rope_parameters=rope | {"factor": 4.0}, pad_token_id=None)
    factors = {"short_factor": [1.0] * 4, "long_factor": [3.0, 5.0, 7.0, 9.0]}
    own = {"original_max_position_embeddings": SHORT}
    return small("phi3", max_position_embeddings=256, rope_parameters=rope | factors | own, pad_token_id=None, **own)


def fresh(kind: str) -> PreTrainedModel:
    """The model as if nothing had been asked of it: dynamic NTK remembers the longest call."""
    running = model(kind)
    running.set_attn_implementation("sdpa")
    running(torch.tensor([[1, 2, 3]]))
    running.set_attn_implementation("kvbench")
    return running


@torch.inference_mode()
def of_transformers(kind: str, ids: Tensor, length: int) -> Tensor:
    """Logits after a prompt in one call and after each token that follows, [n,V]."""
    running, held = fresh(kind), DynamicCache()
    running.set_attn_implementation("sdpa")
    calls = [ids[:, :length], *ids[:, length:].split(1, dim=1)]
    out = torch.cat([running(call, past_key_values=held).logits[0, -1:] for call in calls])
    running.set_attn_implementation("kvbench")
    return out


@torch.inference_mode()
@pytest.mark.parametrize("length", [30, 60])  # decoding across the length; long
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_and_decoding_are_rotated_as_by_transformers(kind: str, length: int) -> None:
    ids = torch.tensor([prompt(length + NEW)])
    expected = of_transformers(kind, ids, length)
    running = fresh(kind)
    held = KVCache(running.config, make_policy("caote_h2o", 100, block=8), prompt_length=length)
    ours = [prefill(running, ids[:, :length], held)]
    ours += [running(token, past_key_values=held).logits[:, -1] for token in ids[:, length:].split(1, dim=1)]
    torch.testing.assert_close(torch.cat(ours), expected, rtol=1e-6, atol=1e-6)  # frequencies are in float32
    assert layout_of(running.config).uniform_length == SHORT


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
def test_a_long_prompt_in_several_calls_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    running, ids = fresh(kind), torch.tensor([prompt(60)])
    held = KVCache(running.config, make_policy("full"), prompt_length=60)
    with pytest.raises(ValueError, match=r"brings 30 tokens .* beyond 32 tokens the model rotates .* in one call"):
        running(ids[:, :30], past_key_values=held)
    short = KVCache(running.config, make_policy("full"), prompt_length=30)
    for part in ids[:, :30].split(15, dim=1):
        running(part, past_key_values=short)
    monkeypatch.setattr("kvbench.engine.teacher_forcing.GIVEN_TOKENS", 16)
    with pytest.raises(ValueError, match="process such a prompt in one call of the model"):
        text_scores(running, ids, make_policy("tova", 16, block=8))


def cached(kind: str, ids: list[list[int]], slug: str) -> tuple[list[list[int]], int]:
    """New tokens of `model.generate` with a KVCache, and the tokens that a KV head then holds."""
    held = KVCache(fresh(kind).config, make_policy(slug, 12))
    return generated(fresh(kind), ids, NEW, past_key_values=held), int(held.kept_tokens().max())


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [27, 28, 32, 33])  # the last token that is fed: 32, 33, ...
def test_texts_around_the_length_are_those_of_transformers(kind: str, length: int) -> None:
    """Phi-3's `generate` computes a text again that grows beyond the length; with dynamic NTK it continues."""
    running, ids = fresh(kind), [prompt(length)]
    running.set_attn_implementation("sdpa")
    expected = generated(running, ids, NEW)
    again = kind == "longrope" and 28 <= length <= SHORT
    for slug in ("full", "fp8", "h2o"):
        ours = kvbench.generate(fresh(kind), torch.tensor(ids), make_policy(slug, 12), max_new_tokens=NEW)
        assert slug != "full" or ours.tokens == expected
        if again:
            with pytest.raises(ValueError, match=r"reaches token 33 .* use kvbench\.generate.* more than 32 tokens"):
                cached(kind, ids, slug)
            assert slug in ("full", "fp8") or int(ours.cache.kept_tokens().max()) <= 12
        else:
            assert (ours.tokens, int(ours.cache.kept_tokens().max())) == cached(kind, ids, slug)


@torch.inference_mode()
def test_a_text_that_is_computed_again_is_compressed_as_a_prompt() -> None:
    running, ids, policy = fresh("longrope"), torch.tensor([prompt(30)]), make_policy("h2o", 12)
    ours = kvbench.generate(running, ids, policy, max_new_tokens=NEW)
    first = torch.cat([ids, torch.tensor([ours.tokens[0][:3]])], dim=1)  # 33 tokens
    rest = kvbench.generate(running, first, policy, max_new_tokens=NEW - 3)
    assert ours.tokens[0][3:] == rest.tokens[0]
    assert [*map(torch.Tensor.tolist, ours.cache.kept_by_layer())] == [
        *map(torch.Tensor.tolist, rest.cache.kept_by_layer())
    ]


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
def test_the_rows_of_a_batch_do_not_change_each_others_rotations(kind: str) -> None:
    prompts, policy = [prompt(30), prompt(25, seed=1)], make_policy("full")
    ids, mask = left_padded(prompts)
    both = kvbench.generate(fresh(kind), ids, policy, attention_mask=mask, max_new_tokens=9).tokens
    alone = [kvbench.generate(fresh(kind), torch.tensor([one]), policy, max_new_tokens=9).tokens for one in prompts]
    assert both == [row for rows in alone for row in rows]


def test_every_model_that_computes_texts_again_is_known() -> None:
    files = Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
    found = {file.parent.name for file in files if "enforce re-compute cache" in file.read_text(encoding="utf-8")}
    assert found == set(AGAIN)
