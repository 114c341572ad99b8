"""Products with packed codes are those with the codes, for every width and length."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvbench.policies.stores.packing import by_row, pack, words_for
from kvbench.policies.stores.products import in_order, scaled, times_codes, times_codes_transposed

BITS = st.sampled_from([1, 2, 4, 8])


def codes(bits: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, 2**bits, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(3))


@given(BITS, st.integers(1, 140), st.integers(1, 4), st.integers(1, 3))
def test_both_products_are_those_with_the_codes(bits: int, count: int, rows: int, r: int) -> None:
    given_codes = codes(bits, 2, rows, count)
    words, exact = pack(given_codes, bits), given_codes.double()
    x, y = torch.rand(2, r, rows, dtype=torch.float64), torch.rand(2, r, count, dtype=torch.float64)
    torch.testing.assert_close(times_codes(x, words, bits, count), x @ exact)
    torch.testing.assert_close(times_codes_transposed(y, words, bits), y @ exact.mT)


@given(BITS, st.integers(1, 64), st.integers(1, 3))
def test_groups_are_scaled_each_by_its_own_factor(bits: int, count: int, groups: int) -> None:
    if words_for(count, bits) > 2:
        return
    given_codes = codes(bits, 5, groups, count)
    scale, weights = torch.rand(5, groups, dtype=torch.float64), torch.rand(1, 5, dtype=torch.float64)
    rows = scaled(pack(given_codes, bits), scale, bits)
    got = in_order((weights @ rows.flatten(-2)).unflatten(-1, (groups, -1)), bits, count)
    expected = (weights[0][:, None, None] * scale[..., None] * given_codes.double()).sum(0)
    torch.testing.assert_close(got[0], expected)


def test_a_row_of_one_word_has_its_planes_side_by_side() -> None:
    words = pack(torch.tensor([[1, 0, 2, 0, 3, 0, 0, 0, 1]], dtype=torch.uint8), 4)[..., :1]
    # Eight codes of four bits: planes of even and of odd places, the latter still 16 times as large.
    assert by_row(words, 4).tolist() == [[1, 2, 3, 0, 0, 0, 0, 0]]
    words = pack(torch.tensor([[0, 1, 0, 0, 0, 0, 0, 15]], dtype=torch.uint8), 4)
    assert by_row(words, 4).tolist() == [[0, 0, 0, 0, 16, 0, 0, 240]]


def test_rows_of_more_words_are_not_for_it() -> None:
    with pytest.raises(AssertionError, match="faster plane by plane"):
        by_row(torch.zeros(1, 3, dtype=torch.int32), 2)
