"""Selection against sorting by hand: protected first, then score, base score, and the lower position."""

import math
from dataclasses import dataclass, replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbench.kernels.selection import select
from kvbench.policies.ranking import Ranking, protected


@dataclass(frozen=True)
class Head:
    """One KV head: a token per slot, None where it is empty; scores are few, so that they tie often."""

    positions: list[int | None]
    scores: list[float]
    base: list[float]
    protected: list[bool]

    def best_first(self) -> list[int]:
        """Slots of stored tokens from the first to keep to the first to go."""
        stored = [(slot, position) for slot, position in enumerate(self.positions) if position is not None]
        score, base = ([-math.inf if math.isnan(x) else x for x in key] for key in (self.scores, self.base))
        ranked = sorted(stored, key=lambda s: (not self.protected[s[0]], -score[s[0]], -base[s[0]], s[1]))
        return [slot for slot, _ in ranked]


@st.composite
def heads(draw: st.DrawFn, packed: bool = False) -> Head:
    """packed: no slot is empty, and tokens lie in order of position."""
    slots = draw(st.integers(1, 12))
    places = draw(st.permutations(range(20)))[:slots]
    empty = [False] * slots if packed else draw(st.lists(st.booleans(), min_size=slots, max_size=slots))
    places = sorted(places) if packed else places
    positions = [None if gone else place for gone, place in zip(empty, places, strict=True)]
    few = st.lists(st.sampled_from([-2.0, -1.0, 0.0, 1.0, -math.inf, math.nan]), min_size=slots, max_size=slots)
    protected = draw(st.lists(st.booleans(), min_size=slots, max_size=slots))
    stored = [p is not None for p in positions]
    return Head(positions, draw(few), draw(few), [p and s for p, s in zip(protected, stored, strict=True)])


def tensors(head: Head) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """scores, base, positions, protected, each [1,1,T]; an empty slot's score is larger than any."""
    positions = torch.tensor([-1 if p is None else p for p in head.positions], dtype=torch.int32)
    scores = torch.tensor(head.scores, dtype=torch.float32).masked_fill(positions < 0, 99.0)
    base = torch.tensor(head.base, dtype=torch.float32)
    return tuple(x[None, None] for x in (scores, base, positions, torch.tensor(head.protected)))


@settings(max_examples=150)
@given(head=heads(), more=st.integers(0, 12))
def test_the_kept_slots_are_those_of_sorting_by_hand(head: Head, more: int) -> None:
    keep = sum(head.protected) + more
    scores, base, positions, protected = tensors(head)
    kept = select(scores, base, positions, protected, keep)[0, 0].nonzero()[:, 0].tolist()
    assert kept == sorted(head.best_first()[:keep])


@settings(max_examples=150)
@given(head=heads(packed=True), more=st.integers(0, 12), based=st.booleans())
def test_what_is_known_of_the_order_changes_no_choice(head: Head, more: int, based: bool) -> None:
    head = head if based else replace(head, base=[0.0] * len(head.base))
    keep = sum(head.protected) + more
    scores, base, positions, protected = tensors(head)
    known = select(scores, base if based else None, positions, protected, keep, ascending=True, packed=True)
    assert known[0, 0].nonzero()[:, 0].tolist() == sorted(head.best_first()[:keep])


@settings(max_examples=150)
@given(head=heads())
def test_the_victim_is_the_one_that_selection_would_drop(head: Head) -> None:
    order = head.best_first()
    if not order or head.protected[order[-1]]:
        return  # nothing may go
    scores, base, positions, protected = tensors(head)
    assert int(Ranking(scores, base, positions, protected, torch.tensor([len(head.base)])).victim()) == order[-1]
    kept = select(scores, base, positions, protected, len(order) - 1)[0, 0]
    assert not bool(kept[order[-1]])


def test_the_first_and_the_newest_positions_are_protected() -> None:
    """Of eight tokens seen: the first, and the newest three, wherever they are stored; no empty slot."""
    positions = torch.tensor([[[7, 0, 4, 5, 2, 6, -1]]])
    stays = protected(positions, torch.tensor([8]), [1], [3])
    assert stays.tolist() == [[[True, True, False, True, False, True, False]]]
