"""Sequences of several lengths in one layer: each holds what it would hold in a dense layer of its own."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbench.policies.stores.dense import Dense
from kvbench.policies.stores.slot_store import SlotStore
from kvbench.policies.stores.store_list import StoreList, each_sequence

HEADS, DIM, WIDE = 2, 4, 6  # values are wider than keys
LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=6)


def layer(length: int, evicting: bool) -> SlotStore:
    """A sequence of `length` tokens at random positions of a longer prompt; one slot is free if it evicts."""
    held = Dense().open(torch.empty(1, HEADS, 0, DIM), torch.empty(1, HEADS, 0, WIDE), ("sums",), 1)
    assert isinstance(held, SlotStore)
    tokens = 2 * length
    held.append(torch.randn(1, HEADS, tokens, DIM), torch.randn(1, HEADS, tokens, WIDE), places(tokens), absent=False)
    kept = torch.rand(1, HEADS, tokens).argsort(-1) < length
    held.keep(kept, spare=1 if evicting else 0)
    held.state["sums"].copy_(torch.rand(1, HEADS, length, 1))
    held.expect(3)
    if evicting:
        held.append(*token(1), torch.tensor([[tokens]]), absent=False)
        held.release(victims(1, length + 1), None)
    return held


def places(tokens: int) -> Tensor:
    return torch.arange(tokens)[None]


def token(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, HEADS, 1, DIM), torch.randn(rows, HEADS, 1, WIDE)


def victims(rows: int, slots: int) -> Tensor:
    return torch.randint(slots, (rows, HEADS, 1))


def layers(lengths: Sequence[int], evicting: bool, seed: int) -> tuple[StoreList, list[SlotStore]]:
    """The same sequences in one layer, and each in its own."""
    torch.manual_seed(seed)
    alone = [layer(length, evicting) for length in sorted(lengths)]
    return StoreList.decoding(deepcopy(alone)), alone


def assert_same(rows: StoreList, alone: Sequence[SlotStore]) -> None:
    assert len(each_sequence(rows)) == len(alone)
    for mine, its in zip(each_sequence(rows), alone, strict=True):
        for name, x in its.contents().items():
            assert torch.equal(mine.contents()[name], x), name
        assert (mine.nbytes, mine.spare_nbytes, mine.parts()) == (its.nbytes, its.spare_nbytes, its.parts())
    assert rows.nbytes == sum(its.nbytes for its in alone)


def step(rows: StoreList, alone: Sequence[SlotStore], evicting: bool) -> None:
    """A token enters every sequence; where they evict, one of each goes."""
    keys, values = token(len(alone))
    at = torch.randint(100, 999, (len(alone), 1))
    rows.append(keys, values, at, absent=False)
    for row, held in enumerate(alone):
        held.append(keys[row : row + 1], values[row : row + 1], at[row : row + 1], absent=False)
    for own, part in rows.by_length if evicting else ():
        gone = victims(own.stop - own.start, part.used)
        part.release(gone, None)
        for held, slots in zip(alone[own], gone.split(1), strict=True):
            held.release(slots, None)


@settings(max_examples=40)
@given(lengths=LENGTHS, evicting=st.booleans(), seed=st.integers(0, 999))
def test_each_holds_what_it_holds_alone(lengths: list[int], evicting: bool, seed: int) -> None:
    """Through steps, growth, sequences that leave, and others that come."""
    rows, alone = layers(lengths, evicting, seed)
    for _ in range(5):  # growing layers make room for three tokens, and then once more
        step(rows, alone, evicting)
        assert_same(rows, alone)
    staying = [row for row in range(len(alone)) if torch.rand(()) < 0.6] or [0]
    held, alone = rows.picked(staying), [alone[row] for row in staying]
    if evicting and len(staying) > 1:
        assert isinstance(held, StoreList)
        more = [layer(4, evicting), layer(2, evicting)]
        held, alone = StoreList.decoding([*each_sequence(held), *deepcopy(more)]), [*alone, *more]
    if len(alone) > 1:
        assert isinstance(held, StoreList)
        step(held, alone, evicting)
        assert_same(held, alone)
    else:
        assert isinstance(held, SlotStore)
        assert_same(StoreList.decoding([held]), alone)
