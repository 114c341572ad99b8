"""Packed codes: the published bit layout, nothing lost, and products with them, for any width and length."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvbench.policies.stores.packing import (
    SHORT,
    by_row,
    in_order,
    pack,
    scaled,
    times_codes,
    times_codes_transposed,
    unpack,
    words_for,
)

BITS = st.sampled_from([1, 2, 4, 8])


def codes(bits: int, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randint(0, 2**bits, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@given(BITS, st.integers(1, 70), st.integers(1, 3), st.integers(0, 1000))
def test_unpacking_gives_back_what_was_packed(bits: int, count: int, rows: int, seed: int) -> None:
    given_codes = codes(bits, (rows, 2, count), seed)
    words = pack(given_codes, bits)
    assert words.dtype == torch.int32
    assert torch.equal(unpack(words, bits, count), given_codes)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_code_j_lies_at_bits_bj_of_its_word(bits: int) -> None:
    given_codes = codes(bits, (3, 64), seed=1)
    words = pack(given_codes, bits).tolist()
    per_word = 32 // bits
    for row, expected in zip(words, given_codes.tolist(), strict=True):
        for j, code in enumerate(expected):
            assert (row[j // per_word] >> (bits * (j % per_word))) & (2**bits - 1) == code


@given(BITS, st.integers(1, 140), st.integers(1, 4), st.integers(1, 3))
def test_both_products_are_those_with_the_codes(bits: int, count: int, rows: int, r: int) -> None:
    given_codes = codes(bits, (2, rows, count), seed=3)
    words, exact = pack(given_codes, bits), given_codes.double()
    x, y = torch.rand(2, r, rows, dtype=torch.float64), torch.rand(2, r, count, dtype=torch.float64)
    torch.testing.assert_close(times_codes(x, words, bits, count), x @ exact)
    torch.testing.assert_close(times_codes_transposed(y, words, bits), y @ exact.mT)


@given(BITS, st.integers(1, 64), st.integers(1, 3))
def test_groups_are_scaled_each_by_its_own_factor(bits: int, count: int, groups: int) -> None:
    if words_for(count, bits) > SHORT:
        return
    given_codes = codes(bits, (5, groups, count), seed=3)
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
