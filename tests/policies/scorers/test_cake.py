"""CAKE's indicator and what it reads while decoding: the worked example of its specification, and its options."""

import pytest
import torch
from cake_examples import example_a, observed

from kvbench import make_policy
from kvbench.policies.allocators.cake import P2A
from kvbench.policies.policy import Policy
from kvbench.policies.scorers.cake import Cake

CANDIDATES = slice(0, 4)


def indicator(**fields: object) -> list[float]:
    """Scores of the four candidates of the worked example."""
    scorer = Cake(**{"window": 2, **fields})
    return scorer.score(example_a(), {})[0, 0, CANDIDATES].tolist()


def test_mean_and_200_variances_are_those_worked_by_hand() -> None:
    heads = Cake(window=2, kernel=1).score_query_heads(example_a(), {})[0, 0, :, CANDIDATES].tolist()
    assert heads == [pytest.approx([6.625, 0.25, 1.75, 1.625]), pytest.approx([0, 25.25, 6.625, 1.75])]
    assert indicator(kernel=1) == pytest.approx([3.3125, 12.75, 4.1875, 1.6875])


def test_pooling_counts_zeros_beyond_the_candidates() -> None:
    assert indicator(kernel=3) == pytest.approx([x / 3 for x in (16.0625, 20.25, 18.625, 5.875)])
    assert indicator(kernel=5) == pytest.approx([x / 5 for x in (20.25, 21.9375, 21.9375, 18.625)])


def test_the_window_keeps_its_own_indicator_for_value_aware_wrappers() -> None:
    got = Cake(window=2, kernel=5).score(example_a(), {})[0, 0, 4:]
    # means 1/16 1/16 and 1/16 1/8, variances 1/128 1/128 and 1/128 4/128
    torch.testing.assert_close(got, torch.tensor([1 / 16 + 200 / 128, 3 / 32 + 200 * 2.5 / 128], dtype=got.dtype))


# decoding


DECODED = torch.tensor([[[0.1, 0.3, 0.2, 0.3, 0.1]]])


@pytest.mark.parametrize(("kernel", "dropped"), [(3, "a"), (5, "c")])
def test_the_newest_query_decides_the_evicted_token(kernel: int, dropped: str) -> None:
    seen = observed(DECODED, phase="decode")
    policy = Policy(scorer=Cake(window=2, kernel=kernel), budget=4)
    ranking = policy.rank(seen, {})
    pooled = {3: [0.4 / 3, 0.2, 0.5 / 3], 5: [0.12, 0.12, 0.12]}[kernel]
    assert ranking.scores[0, 0, :3].tolist() == pytest.approx(pooled)
    assert "abcde"[int(ranking.victim())] == dropped
    assert ["abcde"[int(slot)] for slot in ranking.select(4)[0, 0].nonzero()] == [c for c in "abcde" if c != dropped]


def test_accumulating_adds_every_decoded_query() -> None:
    scorer = Cake(window=2, kernel=1, decode_rule="accumulate")
    state = {name: torch.zeros(1, 1, 5, 1, dtype=torch.float64) for name in scorer.needs.statistics}
    for _ in range(3):
        seen = observed(DECODED, phase="decode")
        scorer.observe(seen, state)
    torch.testing.assert_close(scorer.score(seen, state)[0, 0], 3 * DECODED[0, 0].double())


def test_in_the_order_of_scores_neighbours_are_those_of_the_last_ranking() -> None:
    scorer = Cake(window=2, kernel=3, slot_order="score")
    state = {name: torch.zeros(1, 1, 5, 1, dtype=torch.float64) for name in scorer.needs.statistics}
    state["slot_order"][0, 0, :, 0] = torch.tensor([1.0, 3.0, 2.0, 0, 0])  # read b, c, a
    seen = observed(DECODED, phase="decode")
    scorer.observe(seen, state)
    # b: .3 + .2, c: .3 + .2 + .1, a: .2 + .1
    assert scorer.score(seen, state)[0, 0, :3].tolist() == pytest.approx([0.1, 0.5 / 3, 0.2])


# as a policy


def test_shares_that_wait_for_all_layers_do_not_go_with_scores_that_need_earlier_ones() -> None:
    with pytest.raises(ValueError, match="scores a layer by the tokens that earlier layers kept"):
        Policy(scorer=make_policy("kvec", 64).scorer, allocator=P2A(), budget=64, name="p2a_kvec")
