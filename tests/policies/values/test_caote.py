"""CAOTE and FastCAOTE: worked examples to the last printed digit, and the identity they rest on.

The examples run through the attention function itself: queries are logarithms of weights, keys one-hot.
"""

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kv_crafted import Crafted, drawn, rankings
from kv_examples import ALPHA, BLOCKWISE, CALLS, CANDIDATES, FIVE_VALUES, OUTPUTS, SECOND_ALPHA, Blockwise, crafted
from kv_models import prompt, tiny
from kv_oracle import Rules
from kv_runs import policy_for, run_greedy
from torch import Tensor

from kvbench import make_policy
from kvbench.policies.policy import Policy
from kvbench.policies.values.caote import Caote, normalise
from kvbench.policies.values.fastcaote import FastCaote

SIX_DECIMALS = 5e-7


def five_tokens(policy: Policy, alphas: list[Tensor]) -> tuple[list[float], tuple[int, ...]]:
    """TOVA over example A's values: scores and kept tokens when the newest query of each head attends with alphas."""
    heads = len(alphas)
    queries, keys, values = (torch.zeros(1, h, 5, 8, dtype=torch.float64) for h in (heads, 1, 1))
    for head, alpha in enumerate(alphas):
        queries[0, head, 4, :5] = alpha.log()
    keys[0, 0, :, :5] = torch.eye(5)
    values[0, 0, :, :2] = FIVE_VALUES
    layer = Crafted(policy, query_heads=heads)
    with rankings() as seen:
        layer.call(queries, keys, values)
    return seen[-1].scores(), layer.kept()[0]


def without(token: int) -> tuple[int, ...]:
    """Tokens 0..4 but one; the example counts from 1."""
    return tuple(i for i in range(5) if i != token - 1)


@pytest.mark.parametrize(
    ("slug", "scores", "evicted"),
    [
        ("tova", (0.30, 0.25, 0.20, 0.15, 0.10), 5),
        ("caote_tova", (0.857143, 1.666667, 0.250000, 0.176471, 0.888889), 4),
        ("fastcaote_tova", (0.958315, 1.943651, 0.0, 0.249567, 0.777778), 3),
    ],
)
def test_one_head_as_worked_by_hand(slug: str, scores: tuple[float, ...], evicted: int) -> None:
    got, kept = five_tokens(make_policy(slug, 4), [ALPHA])
    assert got == pytest.approx(scores, abs=SIX_DECIMALS)
    assert kept == without(evicted)


@pytest.mark.parametrize(
    ("gqa", "scores"),
    [
        ("alpha_mean", (0.581523, 1.399287, 0.185606, 0.450758, 2.625000)),
        ("score_mean", (0.540414, 1.295021, 0.367647, 0.573366, 2.569444)),
        ("group_l2", (0.885849, 1.905361, 0.545903, 0.986179, 4.341961)),
    ],
)
def test_a_group_of_two_as_worked_by_hand(gqa: str, scores: tuple[float, ...]) -> None:
    got, kept = five_tokens(make_policy("caote_tova", 4, gqa=gqa), [ALPHA, SECOND_ALPHA])
    assert got == pytest.approx(scores, abs=SIX_DECIMALS)
    assert kept == without(3)


def blockwise(rules: Rules) -> tuple[list[list[float]], list[tuple[int, ...]], Tensor]:
    """Example C: scores at the two events, kept sets after them, outputs of queries 4, 5 and 6."""
    layer = Crafted(policy_for(rules), prompt_length=6)
    queries, keys, values = crafted()
    kept, outputs = [], []
    with rankings() as seen:
        for start, end in CALLS:
            outputs.append(layer.call(queries[:, :, start:end], keys[:, :, start:end], values[:, :, start:end]))
            kept.append(layer.kept()[0])
    return [ranked.scores() for ranked in seen], kept[2:], torch.cat(outputs, dim=2)[0, 0, 4:, :2]


@pytest.mark.parametrize("example", BLOCKWISE, ids=lambda e: e.rules.slug)
def test_the_blockwise_example_as_worked_by_hand(example: Blockwise) -> None:
    (first, second), kept, _ = blockwise(example.rules)
    assert first == pytest.approx(example.first, abs=SIX_DECIMALS)
    assert second == pytest.approx(example.second, abs=SIX_DECIMALS)
    assert kept == [example.first_kept, example.second_kept]


def test_scores_over_the_candidates_only_as_worked_by_hand() -> None:
    rules = Rules("snapkv", 4, "caote", block=2, window=2, kernel=3, norm_domain="candidates")
    (first, second), kept, _ = blockwise(rules)
    assert first[:4] == pytest.approx(CANDIDATES[0], abs=SIX_DECIMALS)
    assert second[:3] == pytest.approx(CANDIDATES[1], abs=SIX_DECIMALS)
    assert kept == [(1, 2, 4, 5), (1, 2, 5, 6)]


@pytest.mark.parametrize("order", list(OUTPUTS))
def test_outputs_of_both_orders_as_worked_by_hand(order: str) -> None:
    _, _, outputs = blockwise(Rules("tova", 4, "caote", block=2, order=order))
    torch.testing.assert_close(outputs, torch.tensor(OUTPUTS[order], dtype=torch.float64), atol=SIX_DECIMALS, rtol=0)


@pytest.mark.parametrize(
    ("how", "expected"), [("sum", (0.1, 0.3, 0.6)), ("minmax_sum", (0.000713, 0.285816, 0.713471))]
)
def test_nonnegative_scores_are_divided_by_their_sum_by_default(how: str, expected: tuple[float, ...]) -> None:
    """minmax_sum by hand: range 5, so (0.005, 2.005, 5.005) / 7.015."""
    scores, counted = torch.tensor([1.0, 3.0, 6.0]), torch.ones(3, dtype=torch.bool)
    torch.testing.assert_close(normalise(scores, counted, how), torch.tensor(expected), atol=SIX_DECIMALS, rtol=0)
    torch.testing.assert_close(normalise(scores, counted), normalise(scores, counted, "sum"))


@pytest.mark.parametrize("constant", [0.0, -2.0])
def test_scores_that_say_nothing_become_equal_weights(constant: float) -> None:
    got = normalise(torch.full((4,), constant), torch.tensor([True, True, False, True]))
    torch.testing.assert_close(got, torch.tensor([1 / 3, 1 / 3, 0.0, 1 / 3]))


# the identity: c_j is the change of the output when token j alone goes


def change_of_output(alpha: Tensor, values: Tensor) -> Tensor:
    """|| X - X'_j || for every j: the weights without j, divided by their sum, [n] x [n,D] -> [n]."""
    whole = alpha @ values
    out = []
    for j in range(len(alpha)):
        rest = [i for i in range(len(alpha)) if i != j]
        out.append((whole - alpha[rest] / alpha[rest].sum() @ values[rest]).norm())
    return torch.stack(out)


@settings(max_examples=40)
@given(
    tokens=st.integers(2, 8),
    seed=st.integers(0, 2**30),
    base=st.sampled_from(["tova", "h2o", "snapkv"]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_scores_are_the_changes_of_the_output(tokens: int, seed: int, base: str, dtype: torch.dtype) -> None:
    """For TOVA alpha is the attention itself; for H2O and SnapKV their own scores divided by the sum.

    Both 1 - alpha_j and X - v_j lose digits as alpha_j nears 1: hence the tolerance.
    """
    fields: dict[str, Any] = {"window": 1, "kernel": 1} if base == "snapkv" else {}
    queries, keys, values = drawn(tokens, seed=seed, dtype=dtype)
    logits = (queries.double() @ keys.double().mT)[0, 0]
    rows = logits.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -torch.inf).softmax(-1)
    alpha = rows.sum(0) / tokens if base == "h2o" else rows[-1]
    assume(bool((1 - alpha > 1e-5).all()))  # beyond that the clamp of 1 - alpha takes over
    with rankings() as seen:
        Crafted(make_policy(f"caote_{base}", tokens - 1, block=128, **fields)).call(queries, keys, values)
    got = torch.tensor(seen[-1].scores(), dtype=torch.float64)
    wrong = (got - change_of_output(alpha, values[0, 0].double())).abs()
    assert bool((wrong <= 30 * torch.finfo(dtype).eps * values.abs().max() / (1 - alpha)).all())


def errors(wrapper: Caote, alpha: Tensor, values: Tensor) -> Tensor:
    """c for weights [n] and values [n,D]."""
    counted = torch.ones(1, 1, len(alpha), dtype=torch.bool)
    return wrapper.eviction_error(alpha[None, None, None], values[None, None], counted)[0, 0, 0]


def test_a_weight_that_rounds_to_one_gives_a_finite_score() -> None:
    got = errors(FastCaote(), torch.tensor([1.0, 0.0]), torch.tensor([[2.0, 0.0], [0.0, 0.0]]))
    assert got.tolist() == [pytest.approx(1e6, rel=1e-5), 0.0]  # 1 / 1e-6 times the distance 1 from the mean


@pytest.mark.parametrize(("slug", "fields"), [("caote_random", {}), ("caote_vase", {"window": 6})])
def test_scores_in_float32_weigh_the_values_of_a_float64_model(slug: str, fields: dict[str, Any]) -> None:
    run = run_greedy(tiny(), [prompt(40)], make_policy(slug, 24, schedule="prompt", **fields), 1)
    assert [len(head) for layer in run.of_row(0)[0] for head in layer] == [24] * 4
