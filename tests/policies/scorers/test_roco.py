"""RoCo: the worked example of its specification, and which tokens are spared."""

import pytest
import torch
from kv_crafted import observed
from kv_models import prompt, tiny
from kv_runs import run_greedy

from kvbench import make_policy
from kvbench.policies.observation import Observation, Phase, State
from kvbench.policies.policy import Policy
from kvbench.policies.scorers.h2o import H2O
from kvbench.policies.scorers.roco import RoCo, mean_and_deviation
from kvbench.policies.scorers.scorer import Scorer

# Attention drawn by five tokens: four entered together, the last three steps later.
HISTORIES = [[0.4, 0.4, 0.4, 0.4], [0, 0.4, 0, 0.4], [0.1, 0.1, 0.1, 0.1], [0, 0.2, 0, 0], [0.15]]


def seen_by(positions: list[int], seen: int, budget: int, phase: Phase) -> Observation:
    """Tokens at these positions, by one query."""
    keys = torch.zeros(1, 1, len(positions), 2)
    return observed(keys, keys[:, :, -1:], torch.tensor(positions)[None, None], seen, phase=phase, budgets=(budget,))


def moments(histories: list[list[float]]) -> State:
    sums = [sum(h) for h in histories]
    squares = [sum(a * a for a in h) for h in histories]
    return {
        name: torch.tensor(x)[None, None, :, None]
        for name, x in (("attention_mean", sums), ("attention_square", squares), ("attention_sum", sums))
    }


def test_mean_and_deviation_of_the_worked_example() -> None:
    state = moments(HISTORIES)
    counts = torch.tensor([[[4, 4, 4, 4, 1]]])
    mean, deviation = mean_and_deviation(state["attention_mean"][..., 0], state["attention_square"][..., 0], counts)
    torch.testing.assert_close(mean, torch.tensor([[[0.4, 0.2, 0.1, 0.05, 0.15]]]))
    expected = torch.tensor([[[0, 0.2, 0, 0.05 * 3**0.5, 0]]])
    torch.testing.assert_close(deviation, expected, atol=2e-4, rtol=0)  # a square root of cancelled float32 digits


@pytest.mark.parametrize(
    ("scorer", "evicted"),
    [
        (RoCo(sinks=0, recent=0, decode_share=0.5), 2),  # spares 1 and 3, whose attention varies most
        (RoCo(sinks=0, recent=0, decode_share=0.0), 3),  # mean attention alone
        (H2O(recent=0), 4),  # sums
    ],
    ids=["roco", "mean", "h2o"],
)
def test_the_worked_example_evicts(scorer: Scorer, evicted: int) -> None:
    # Positions 0 and 3 after 4 tokens give the counts 4 and 1; that slots share a position is of no account here.
    seen = seen_by([0, 0, 0, 0, 3], seen=4, budget=4, phase="decode")
    policy = Policy(scorer=scorer, budget=4)
    assert policy.rank(seen, moments(HISTORIES)).victim().tolist() == [[[evicted]]]


@pytest.mark.parametrize(
    ("phase", "spared"),
    [
        ("prompt", {0, 1, 2, 3}),  # sinks; every other token may go
        # 48 - (40 - floor(0.1 * 40) - 4) = 16 tokens are no candidates, 4 sinks and the 10 newest among them
        ("block", {0, 1, 2, 3, 4, 5}),
        # 48 - (40 - floor(0.3 * 40)) = 20, the 10 newest among them
        ("decode", {*range(10)}),
    ],
)
def test_spared_tokens_by_phase(phase: Phase, spared: set[int]) -> None:
    tokens = 48
    stays = spared_of(tokens, 40, phase)
    assert stays == spared | set(range(tokens - 10, tokens))


def spared_of(tokens: int, budget: int, phase: Phase) -> set[int]:
    """Positions that are not candidates; the older a token, the more its attention deviates and the lower its mean."""
    histories = [[0.0] * (tokens - i - 1) + [(tokens - i) ** 2 * 1e-4] for i in range(tokens)]
    seen = seen_by(list(range(tokens)), seen=tokens, budget=budget, phase=phase)
    stays = Policy(scorer=RoCo(), budget=budget).rank(seen, moments(histories)).protected[0, 0]
    return {int(i) for i in stays.nonzero()}


@pytest.mark.parametrize(("budget", "others"), [(40, 13), (128, 39), (20, 10)])
def test_one_decoded_token_leaves_as_many_candidates_as_easykv(budget: int, others: int) -> None:
    """Its top-k of the budget - floor(0.3 * budget) smallest deviations, of budget + 1; the newest ten are infinite."""
    assert spared_of(budget + 1, budget, "decode") == {*range(others - 10), *range(budget + 1 - 10, budget + 1)}


def test_blocks_without_sinks_are_evicted_to_the_budget() -> None:
    run = run_greedy(tiny(), [prompt(40)], make_policy("roco", 24, sinks=0, recent=4, block=16), 2)
    assert [len(head) for kept in run.of_row(0) for layer in kept for head in layer] == [16] * 4 + [24] * 12
