"""Rotations that depend on length: a prompt in blocks is rotated as one call of transformers rotates it."""

from functools import cache
from typing import Any

import pytest
import torch
from kv_models import prompt
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM, PreTrainedModel

from kvbench import KVCache, make_policy
from kvbench.cache.families import layout_of
from kvbench.engine.prefill import prefill
from kvbench.engine.teacher_forcing import text_scores

SHORT, NEW = 32, 6
KINDS = ["longrope", "dynamic"]


@cache
def model(kind: str) -> PreTrainedModel:
    """A random model trained, as it were, on 32 tokens."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    }
    rope: dict[str, Any] = {"rope_theta": 10000.0, "rope_type": kind}
    if kind == "longrope":
        rope |= {
            "short_factor": [1.0] * 4,
            "long_factor": [3.0, 5.0, 7.0, 9.0],
            "original_max_position_embeddings": SHORT,
        }
        config = Phi3Config(**sizes, max_position_embeddings=256, rope_parameters=rope)
        config.original_max_position_embeddings = SHORT
        return Phi3ForCausalLM(config).double().eval()
    rope |= {"factor": 4.0}
    return LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=SHORT, rope_parameters=rope)).double().eval()


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
