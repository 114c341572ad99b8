"""Packed codes: the published bit layout, and nothing lost for any width and length."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvbench.policies.stores.packing import from_planes, in_planes, pack, planes, unpack, words_for

BITS = st.sampled_from([1, 2, 4, 8])


def codes(bits: int, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randint(0, 2**bits, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@given(BITS, st.integers(1, 70), st.integers(1, 3), st.integers(0, 1000))
def test_unpacking_gives_back_what_was_packed(bits: int, count: int, rows: int, seed: int) -> None:
    given_codes = codes(bits, (rows, 2, count), seed)
    words = pack(given_codes, bits)
    assert words.dtype == torch.int32
    assert torch.equal(unpack(words, bits, count), given_codes)


def test_sixteen_two_bit_codes_fill_the_word_of_the_worked_example() -> None:
    words = pack(torch.tensor([3, 0, 1, 2] * 4, dtype=torch.uint8), 2)
    assert words.tolist() == [-1819044973]  # 0x93939393, lowest code first


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_code_j_lies_at_bits_bj_of_its_word(bits: int) -> None:
    given_codes = codes(bits, (3, 64), seed=1)
    words = pack(given_codes, bits).tolist()
    per_word = 32 // bits
    for row, expected in zip(words, given_codes.tolist(), strict=True):
        for j, code in enumerate(expected):
            assert (row[j // per_word] >> (bits * (j % per_word))) & (2**bits - 1) == code


@pytest.mark.parametrize(("count", "bits", "words"), [(16, 2, 1), (17, 2, 2), (32, 8, 8), (128, 2, 8), (5, 1, 1)])
def test_a_row_takes_whole_words_and_no_more(count: int, bits: int, words: int) -> None:
    assert words_for(count, bits) == words
    assert pack(codes(bits, (2, count), seed=0), bits).shape == (2, words)


@given(BITS, st.integers(1, 70))
def test_a_product_over_planes_is_the_product_over_codes(bits: int, count: int) -> None:
    given_codes = codes(bits, (3, count), seed=2)
    weights = torch.rand(2, count, dtype=torch.float64)
    unpacked = planes(pack(given_codes, bits), bits).double()
    assert unpacked.shape == (8 // bits, 3, 4 * words_for(count, bits))
    over = (in_planes(weights, bits) @ unpacked.mT).sum(0)
    torch.testing.assert_close(over, weights @ given_codes.T.double())
    rows = torch.rand(2, 3, dtype=torch.float64)
    torch.testing.assert_close(from_planes(rows @ unpacked, bits, count), rows @ given_codes.double())
