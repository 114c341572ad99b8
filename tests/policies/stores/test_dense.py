"""The dense store holds what was kept, with room behind it for the tokens to come."""

import pytest
import torch

from kvbench.kernels import selection
from kvbench.policies.stores.slot_store import SlotStore


@pytest.mark.parametrize("many", [selection.MANY, 1], ids=["few numbers", "many"])
@pytest.mark.parametrize("counts", [(2, 2), (3, 1)])
@pytest.mark.parametrize("spare", [0, 2])
def test_what_is_kept_comes_first_and_room_behind_it_is_empty(
    counts: tuple[int, int], spare: int, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "MANY", many)
    keys, values = torch.arange(1.0, 11.0).view(1, 2, 5, 1), torch.arange(11.0, 21.0).view(1, 2, 5, 1)
    held = SlotStore(keys, values, ("sums",), width=1)
    held.append(keys, values, torch.arange(5)[None])
    held.state["sums"].copy_(-keys)
    mask = torch.zeros(1, 2, 5, dtype=torch.bool)
    mask[0, 0, 5 - counts[0] :], mask[0, 1, : counts[1]] = True, True
    moved = held.keep(mask, spare)
    most = max(counts)
    kept = [[*range(5 - counts[0], 5)], [*range(counts[1])]]
    assert moved.shape == (1, 2, most)
    for head, own in enumerate(kept):
        assert moved[0, head, : len(own)].tolist() == own
        assert held.positions[0, head].tolist() == [*own, *[-1] * (most - len(own))]
        assert held.keys[0, head, : len(own), 0].tolist() == [5.0 * head + slot + 1 for slot in own]
        assert held.values[0, head, : len(own), 0].tolist() == [5.0 * head + slot + 11 for slot in own]
        assert held.state["sums"][0, head, : len(own), 0].tolist() == [-(5.0 * head + slot + 1) for slot in own]
    assert held.used + held.room == most + spare


def test_the_next_tokens_go_into_the_room_that_was_made() -> None:
    keys = torch.arange(1.0, 5.0).view(1, 1, 4, 1)
    held = SlotStore(keys, keys, (), width=1)
    held.append(keys, keys, torch.arange(4)[None])
    held.keep(torch.tensor([[[True, False, True, False]]]), spare=2)
    for token in (4, 5):
        new = torch.full((1, 1, 1, 1), token + 1.0)
        held.append(new, new, torch.tensor([[token]]))
    assert held.used + held.room == 4
    assert held.positions.tolist() == [[[0, 2, 4, 5]]]
    assert held.keys.flatten().tolist() == held.values.flatten().tolist() == [1.0, 3.0, 5.0, 6.0]


def test_a_layer_without_tokens_keeps_none_and_makes_room() -> None:
    nothing = torch.zeros(2, 3, 0, 4)
    held = SlotStore(nothing, nothing, ("sums",), width=1)
    moved = held.keep(torch.zeros(2, 3, 0, dtype=torch.bool), spare=1)
    assert (moved.shape, held.used + held.room) == ((2, 3, 0), 1)
    held.append(torch.ones(2, 3, 1, 4), torch.ones(2, 3, 1, 4), torch.zeros(2, 1))
    assert held.used + held.room == 1
    assert held.positions.tolist() == [[[0]] * 3] * 2
