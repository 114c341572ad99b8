"""Attention sinks (gpt-oss): they take probability in every route of attention and in every row a policy reads."""

import torch
from kv_models import SLIDING, small
from kv_runs import assert_full_is_eager

from kvbench.policies.readers.oracle import OracleTopK
from kvbench.policies.readers.reader import Reading
from kvbench.policies.readers.rocketkv import RocketKV


def test_the_full_cache_gives_the_models_own_logits() -> None:
    """One layer slides, and the sinks are large enough to matter: without them, logits differ by 5."""
    rope = {"rope_type": "default", "rope_theta": 1e4}
    model = small("gpt_oss", torch.float32, sliding_window=SLIDING, rope_parameters=rope)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.uniform_(-1, 3)
    assert_full_is_eager(model)


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
