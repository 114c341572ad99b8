"""Packed codes: the published bit layout, and nothing lost, for any width and length."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvbench.policies.stores.quantiser import pack, unpack

BITS = st.sampled_from([1, 2, 4, 8])


def codes(bits: int, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randint(0, 2**bits, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@given(BITS, st.integers(1, 70), st.integers(1, 3), st.integers(0, 1000))
def test_unpacking_inverts_packing(bits: int, count: int, rows: int, seed: int) -> None:
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
