"""The newest turn on crafted slots."""

import pytest
import torch
from newest_turn import NewestTurn

from kvbench.policies.needs import Protected
from kvbench.policies.observation import AttentionParams, Observation, SequenceInfo


def test_tokens_of_the_newest_turn_stay_but_not_the_first_prompt() -> None:
    positions, none = torch.tensor([[[0, 3, 5, 8, 9, -1]]]), torch.zeros(1, 1, 1, 2)  # -1: an empty slot
    for begin, stays in ((0, []), (5, [5, 8])):  # position 9 is a token of the answer
        seen = Observation(
            layer=0,
            queries=none,
            query_positions=torch.tensor([[9]]),
            keys=none,
            values=none,
            positions=positions,
            seen=torch.tensor([10]),
            phase="decode",
            params=AttentionParams(scaling=1.0),
            sequences=SequenceInfo(prompts=(9,), begins=(begin,)),
        )
        assert positions[NewestTurn().mask(seen, ())].tolist() == stays


def test_a_turn_that_does_not_fit_is_refused() -> None:
    NewestTurn().check_fits("h2o", 20, Protected(first=4, newest=6), 90, 80, ())  # a turn of 10 tokens
    with pytest.raises(ValueError, match="a turn of 10 tokens"):
        NewestTurn().check_fits("h2o", 19, Protected(first=4, newest=6), 90, 80, ())
