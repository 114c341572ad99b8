"""KIVI: its schedule, its arithmetic, and attention straight from codes."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_stores import feed, stream

from kvbench.policies.stores.kivi import Kivi

SMALL = Kivi(group=4, residual=4)


def lengths(held: Any) -> tuple[int, ...]:
    """Keys quantised and full, values quantised and full."""
    return tuple(number for side in range(2) for number in (held.in_codes[side], held.exact_of(side)))


@pytest.mark.parametrize(
    ("tokens", "expected"), [(3, (0, 3, 0, 3)), (4, (4, 0, 0, 4)), (8, (8, 0, 4, 4)), (10, (8, 2, 6, 4))]
)
def test_quantized_tokens_after_a_prompt_follow_the_published_code(
    tokens: int, expected: tuple[int, int, int, int]
) -> None:
    assert lengths(feed(SMALL, *stream(tokens))) == expected


@settings(max_examples=25)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.sampled_from([(4, 8), (4, 4), (4, 0), (8, 8)]))
def test_the_state_does_not_depend_on_how_the_stream_was_split(splits: list[int], sizes: tuple[int, int]) -> None:
    store = Kivi(group=sizes[0], residual=sizes[1])
    keys, values = stream(sum(splits))
    whole, parts = feed(store, keys, values), feed(store, keys, values, splits)
    assert lengths(whole) == lengths(parts)
    assert torch.equal(whole.keys, parts.keys)
    assert torch.equal(whole.values, parts.values)


def test_a_group_that_does_not_divide_the_head_dimension_is_refused_in_one_sentence() -> None:
    with pytest.raises(ValueError, match="group=32 does not divide the head dimension 80 of the values"):
        feed(Kivi(group=32, residual=32), *stream(64, dim=80))
    assert feed(Kivi(), *stream(300, dim=80)).sizes().kinds["codes"] > 0  # a group beyond the dimension is all of it
