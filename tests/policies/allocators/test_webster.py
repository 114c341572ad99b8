"""Webster's rule: hand-worked cases, the greedy rule itself, and laws for any preferences."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.policies.allocators.webster import webster


def one_at_a_time(preference: list[float], total: int, caps: list[int]) -> list[int]:
    """The rule as it is said: every slot goes to the largest preference / (2 * slots + 1) below its cap."""
    slots = np.zeros(len(preference), dtype=int)
    for _ in range(min(total, sum(caps))):
        quotients = np.where(slots < caps, np.array(preference) / (2 * slots + 1), -1.0)
        slots[quotients.argmax()] += 1
    return slots.tolist()


def test_each_stage_of_the_hand_worked_cascade() -> None:
    # of all three layers 5.4, 2.7 and 0.9 slots
    assert [webster([6, 3, 1][:n], 9, 10) for n in (1, 2, 3)] == [[9], [6, 3], [5, 3, 1]]


def test_layers_without_preference_share_leftover_slots_evenly() -> None:
    assert webster([0, 5, 0, 0], 12, 5) == [3, 5, 2, 2]
    assert webster([0, 0, 0], 7, 5) == [3, 2, 2]


@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=12), st.integers(0, 300), st.data())
def test_the_fast_way_is_one_slot_at_a_time(preference: list[float], total: int, data: st.DataObject) -> None:
    caps = data.draw(st.lists(st.integers(0, 50), min_size=len(preference), max_size=len(preference)))
    assert webster(preference, total, caps) == one_at_a_time(preference, total, caps)


@pytest.mark.parametrize("wrong", [-1.0, float("inf"), float("nan")])
def test_a_preference_that_is_negative_or_not_finite_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="finite numbers of 0 or more"):
        webster([1.0, wrong], 3, 3)
