"""Attention sinks (gpt-oss): they take probability in every route of attention and in every row a policy reads."""

from __future__ import annotations

from typing import Any

import torch
from kv_models import prompt as words
from transformers import AutoModelForCausalLM, GptOssConfig

from kvbench import KVCache, make_policy
from kvbench.policies.readers.oracle import OracleTopK
from kvbench.policies.readers.reader import Reading
from kvbench.policies.readers.rocketkv import RocketKV

LENGTH, NEW = 60, 6


def gpt_oss(dtype: torch.dtype = torch.float32) -> Any:
    """A tiny random gpt-oss: two layers, one with a sliding window, experts, and sinks large enough to matter."""
    config = GptOssConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=24,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=2048,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.uniform_(-1, 3)
    return model


def test_the_full_cache_gives_the_models_own_logits() -> None:
    model, ids = gpt_oss(), torch.tensor([words(LENGTH)])
    model.set_attn_implementation("eager")
    expected = model(ids).logits
    model.set_attn_implementation("kvbench")
    cache = KVCache(model.config, make_policy("full"), prompt_length=LENGTH - 4)
    got = [model(ids[:, : LENGTH - 4], past_key_values=cache).logits]
    got += [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(LENGTH - 4, LENGTH)]
    torch.testing.assert_close(torch.cat(got, 1), expected, rtol=1e-4, atol=1e-4)  # without the sinks: 5


def test_readers_weigh_tokens_with_the_sinks_and_the_softcap_of_the_model() -> None:
    """The oracle's scores are the model's attention; RocketKV with all channels and pages of one token estimates it."""
    torch.manual_seed(0)
    queries, keys, sinks = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 20, 8), torch.tensor([[3.0, -3.0, 0.0, 2.0]])
    for cap, given in ((None, sinks), (2.0, sinks), (2.0, None)):
        rows = []
        for head in range(4):
            logits = keys[0, head // 2] @ queries[0, head, 0] * 0.5
            logits = logits if cap is None else cap * torch.tanh(logits / cap)
            added = logits if given is None else torch.cat([logits, given[:, head]])
            rows.append(added.softmax(-1)[:20])
        expected = torch.stack(rows).view(2, 2, 20).mean(1)[None]
        for reader in (OracleTopK(), RocketKV()):
            reading = Reading(
                layer=0,
                queries=queries,
                keys=keys,
                positions=torch.arange(20).expand(1, 2, 20),
                summaries=reader.summarise(keys[:, :, :, None], torch.ones(1, 2, 20, 1, dtype=torch.bool)),
                visible=torch.ones(1, 2, 20, dtype=torch.bool),
                scaling=0.5,
                softcap=cap,
                sinks=given,
                budgets=(10**6,),
                prompts=(20,),
            )
            torch.testing.assert_close(reader.score(reading), expected)
