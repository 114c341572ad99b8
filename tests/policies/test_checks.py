"""The sentences with which a part refuses a value of one of its fields."""

import math
from dataclasses import dataclass

import pytest
from torch import Tensor

from kvbench.policies.checks import choice, number, whole_number
from kvbench.policies.needs import Protected
from kvbench.policies.observation import Observation, State
from kvbench.policies.policy import Policy
from kvbench.policies.scorers.scorer import Scorer


def test_a_choice_names_all_that_a_field_may_be() -> None:
    choice("pool", "avg", "max", "avg", "none")
    choice("bits", 4, 2, 4, 8)
    with pytest.raises(ValueError, match=r"^pool must be max, avg or none, got 'sum'$"):
        choice("pool", "sum", "max", "avg", "none")
    with pytest.raises(ValueError, match=r"^norm must be l1 or l2, got 'l3'$"):
        choice("norm", "l3", "l1", "l2")
    with pytest.raises(ValueError, match=r"^bits must be 2, 4 or 8, got 3$"):
        choice("bits", 3, 2, 4, 8)


@pytest.mark.parametrize(
    ("value", "said"), [(0, "0"), (-1, "-1"), (1.0, "1.0"), (True, "true"), ("1", "'1'"), (None, "null")]
)
def test_a_whole_number_is_neither_smaller_nor_a_float_nor_true(value: object, said: str) -> None:
    whole_number("m", 1, 1)
    with pytest.raises(ValueError, match=f"^m must be a whole number of at least 1, got {said}$"):
        whole_number("m", value, 1)


@pytest.mark.parametrize(
    ("value", "said"),
    [(-0.1, "-0.1"), (1.1, "1.1"), (math.nan, "nan"), (True, "true"), ("0.5", "'0.5'"), (None, "null")],
)
def test_a_number_lies_between_its_ends(value: object, said: str) -> None:
    number("beta", 0, 0, 1)
    number("beta", 1.0, 0, 1)
    with pytest.raises(ValueError, match=f"^beta must be a number from 0 to 1, got {said}$"):
        number("beta", value, 0, 1)


def test_a_number_is_finite_and_may_have_an_end_it_does_not_reach() -> None:
    number("gamma", 1e9, 0)
    number("share", 0.999, 0, below=1)
    with pytest.raises(ValueError, match=r"^gamma must be a number of at least 0, got inf$"):
        number("gamma", math.inf, 0)
    with pytest.raises(ValueError, match=r"^share must be a number of at least 0 and below 1, got 1.0$"):
        number("share", 1.0, 0, below=1)


@dataclass(frozen=True)
class Backwards(Scorer):
    def protects(self, budget: int) -> Protected:
        return Protected(newest=-3)

    def score(self, observation: Observation, state: State) -> Tensor:
        return -observation.positions.float()


def test_a_scorer_cannot_protect_fewer_tokens_than_none() -> None:
    with pytest.raises(ValueError, match=r"newest tokens that mine's scorer protects must be .* at least 0, got -3"):
        Policy(scorer=Backwards(), budget=16, name="mine")
