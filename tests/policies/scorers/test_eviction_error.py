"""DropKV and ReST-KV against a number worked by hand, the definition of an eviction, and the released code."""

import math
from typing import Any

import pytest
import torch
from kv_crafted import drawn, windowed
from kv_models import Projects
from task_data import recorded
from torch import Tensor

from kvbench import make_policy
from kvbench.policies.observation import Observation
from kvbench.policies.scorers.eviction_error import EvictionError, shifted_mean


def tensor(x: Any) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def test_one_query_by_hand() -> None:
    """Attention 3/4 and 1/4 on the values 0 and 4: the output is 1, and evicting them moves it by 3 and by 1."""
    keys = tensor([[[math.log(3.0)], [0.0]]])
    seen = windowed(tensor([[[1.0]]]), keys, tensor([[[0.0], [4.0]]]), 1)
    got = EvictionError(window=1, kernel=1, epsilon=0.0).score(seen, {})
    torch.testing.assert_close(got, tensor([[[3.0, 1.0]]]))


def test_the_error_is_that_of_attention_without_the_token() -> None:
    queries, keys, values = (x[0] for x in drawn(12, 4, 2))
    projection = torch.randn(4, 8, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    seen = windowed(queries[:, -3:], keys, values, 6, Projects(projection))
    scorer = EvictionError(window=3, space="output", pool="none", epsilon=0.0)
    expected = torch.zeros(2, 12, dtype=torch.float64)
    for head in range(4):
        for query in range(9, 12):
            logits = keys[head // 2] @ queries[head, query] * 8**-0.5
            sees = torch.arange(12) <= query
            out = logits.masked_fill(~sees, -torch.inf).softmax(-1) @ values[head // 2]
            for token in range(query + 1):
                others = sees & (torch.arange(12) != token)
                moved = logits.masked_fill(~others, -torch.inf).softmax(-1) @ values[head // 2]
                expected[head // 2, token] += ((moved - out) @ projection[head]).norm() / 2
    torch.testing.assert_close(scorer.score(seen, {})[0], expected)


def test_the_mean_is_shifted_and_repeats_the_ends() -> None:
    x = tensor([1, 2, 4, 8])
    assert shifted_mean(x, 3, 0).tolist() == pytest.approx([4 / 3, 7 / 3, 14 / 3, 20 / 3])
    assert shifted_mean(x, 3, 1).tolist() == pytest.approx([7 / 3, 14 / 3, 20 / 3, 8])
    assert shifted_mean(x, 1, -2).tolist() == [1, 1, 1, 2]


def test_a_drift_to_older_tokens_shifts_the_kernel() -> None:
    """The first query attends to 8 and 9, the second to 1 and 2: a drift of 7 tokens."""
    attention = torch.zeros(2, 12)
    attention[0, [8, 9]], attention[1, [1, 2]] = tensor([0.4, 0.6]).float(), tensor([0.4, 0.6]).float()
    assert EvictionError(window=2, scale=2.0, kernel=5, pool="adaptive").drift_reach(attention, 2) == (7, 3)
    assert EvictionError(window=2, scale=2.0, kernel=5, pool="adaptive").drift_reach(attention.flip(0), 2) == (7, -3)
    assert EvictionError(window=2, scale=8.0, kernel=5, pool="adaptive").drift_reach(attention, 2) == (5, 0)


# --- the released code ----------------------------------------------------------------------------------------------
def kept(policy: Any, seen: Observation, budget: int) -> list[list[int]]:
    return [own.nonzero().flatten().tolist() for own in policy.rank(seen, {}).select(budget)[0]]


def test_dropkv_s_scores_and_sets_are_those_of_the_released_code_in_float64() -> None:
    for case in recorded("additions3/dropkv.jsonl"):
        seen = windowed(*(tensor(case[name]) for name in ("queries", "keys", "values")), case["budget"])
        fields = {"window": case["window"], "kernel": case["kernel"], "epsilon": case["epsilon"]}
        for reach, scores, sets in (
            ("all", "pooled", "kept"), ("candidates", "pooled_candidates_only", "kept_candidates_only"),
        ):  # fmt: skip
            policy = make_policy("dropkv", case["budget"], reach=reach, **fields)
            raw = policy.scorer.raw(seen, {})
            torch.testing.assert_close(raw[0], tensor(case["raw_per_query_head"]), rtol=1e-6, atol=1e-12)
            found = policy.scorer.score(seen, {})[0, :, : len(case[scores][0])]
            torch.testing.assert_close(found, tensor(case[scores]), rtol=1e-6, atol=1e-12)
            assert kept(policy, seen, case["budget"]) == case[sets]


def test_restkv_s_scores_and_sets_are_those_of_the_released_code() -> None:
    """Its code does not bound 1 - A: `epsilon` is 0."""
    for case in recorded("additions3/restkv.jsonl"):
        queries, keys, values = (tensor(case[name]) for name in ("queries", "keys", "values"))
        group = len(queries) // len(keys)
        keys, values = (x.repeat_interleave(group, 0) for x in (keys, values))
        projection = tensor(case["output_projection"]).T.unflatten(0, (len(queries), -1))
        seen = windowed(queries, keys, values, case["budget"], Projects(projection))
        policy = make_policy(
            "restkv",
            case["budget"],
            window=case["window"],
            rows="attention" if case["metric_mode"] == "after" else "errors",
            over_queries="ema" if case["use_ema"] else "mean",
            alpha=case["alpha"],
            space="output" if case["use_wo"] else "value",
            tau=case["tau"] if case["use_wo"] else 1.0,
            relative=case["use_norm"],
            pool=case["pooling"].removesuffix("pool"),
            kernel=case["kernel"],
            scale=float(case["scale"]),
            epsilon=0.0,
        )
        scorer, before = policy.scorer, keys.shape[1] - case["window"]
        pooled = scorer.score(seen, {})[0, :, :before]
        torch.testing.assert_close(pooled, tensor(case["pooled"]), rtol=1e-6, atol=1e-12)
        assert kept(policy, seen, case["budget"]) == case["kept"]
        if case["drift"] is not None:
            rows = seen.window_attention(case["window"])[0, :, 0]
            reaches = [scorer.drift_reach(own, case["budget"] - case["window"]) for own in rows]
            assert [list(reach) for reach in zip(*reaches, strict=True)] == [case["kernels"], case["shifts"]]
