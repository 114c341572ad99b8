"""The dense store moves rows of numbers, however they lie in memory."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbench.policies.stores import dense
from kvbench.policies.stores.dense import DenseHeld, take

LAYOUTS = {
    "a row after another": lambda x: x,
    "as a projection leaves them": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "in front of room": lambda x: torch.cat([x, torch.full_like(x, 99.0)], dim=2)[:, :, : x.shape[2]],
    "behind others": lambda x: torch.cat([torch.full_like(x, 99.0), x], dim=2)[:, :, x.shape[2] :],
    "beside others": lambda x: torch.cat([x, torch.full_like(x, 99.0)[..., :1]], dim=3)[..., :-1],
    "the same for all heads": lambda x: x[:, :1].expand_as(x),
    "numbers far apart": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
}


@pytest.fixture(params=[dense.MANY, 1], ids=["few", "many"])
def many(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many numbers are copied by rows, with these small tensors too."""
    monkeypatch.setattr(dense, "MANY", request.param)


@pytest.mark.usefixtures("many")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 7), st.integers(1, 4)),
    most=st.integers(0, 8),
    seed=st.integers(0, 999),
)
def test_taken_rows_are_those_of_their_slots(
    layout: Callable[[Tensor], Tensor], shape: tuple[int, int, int, int], most: int, seed: int
) -> None:
    torch.manual_seed(seed)
    batch, heads, slots, _ = shape
    x = layout(torch.randn(shape))
    chosen = torch.randint(slots, (batch, heads, most))
    taken = take(x, chosen)
    assert taken.shape == (batch, heads, most, shape[3])
    for b, h in torch.cartesian_prod(torch.arange(batch), torch.arange(heads)).tolist():
        rows = [x[b, h, slot].tolist() for slot in chosen[b, h].tolist()]
        assert taken[b, h].tolist() == rows


@pytest.mark.usefixtures("many")
def test_gradients_reach_the_rows_that_were_taken() -> None:
    x = torch.zeros(1, 1, 3, 2, requires_grad=True)
    take(x, torch.tensor([[[2, 0, 2]]])).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[[[1.0, 1.0], [0.0, 0.0], [2.0, 2.0]]]]


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("counts", [(2, 2), (3, 1)])
@pytest.mark.parametrize("spare", [0, 2])
def test_what_is_kept_comes_first_and_room_behind_it_is_empty(counts: tuple[int, int], spare: int) -> None:
    keys, values = torch.arange(1.0, 11.0).view(1, 2, 5, 1), torch.arange(11.0, 21.0).view(1, 2, 5, 1)
    held = DenseHeld(keys, values, ("sums",), width=1)
    held.append(keys, values, torch.arange(5)[None], absent=False)
    held.state["sums"].copy_(-keys)
    mask = torch.zeros(1, 2, 5, dtype=torch.bool)
    mask[0, 0, 5 - counts[0] :], mask[0, 1, : counts[1]] = True, True
    slots = held.keep(mask, spare)
    most = max(counts)
    kept = [[*range(5 - counts[0], 5)], [*range(counts[1])]]
    assert slots.shape == (1, 2, most)
    for head, own in enumerate(kept):
        assert slots[0, head, : len(own)].tolist() == own
        assert held.positions[0, head].tolist() == [*own, *[-1] * (most - len(own))]
        assert held.keys[0, head, : len(own), 0].tolist() == [5.0 * head + slot + 1 for slot in own]
        assert held.values[0, head, : len(own), 0].tolist() == [5.0 * head + slot + 11 for slot in own]
        assert held.state["sums"][0, head, : len(own), 0].tolist() == [-(5.0 * head + slot + 1) for slot in own]
    assert held.capacity == most + spare


def test_the_next_tokens_go_into_the_room_that_was_made() -> None:
    keys = torch.arange(1.0, 5.0).view(1, 1, 4, 1)
    held = DenseHeld(keys, keys, (), width=1)
    held.append(keys, keys, torch.arange(4)[None], absent=False)
    held.keep(torch.tensor([[[True, False, True, False]]]), spare=2)
    for token in (4, 5):
        new = torch.full((1, 1, 1, 1), token + 1.0)
        held.append(new, new, torch.tensor([[token]]), absent=False)
    assert held.capacity == 4
    assert held.positions.tolist() == [[[0, 2, 4, 5]]]
    assert held.keys.flatten().tolist() == held.values.flatten().tolist() == [1.0, 3.0, 5.0, 6.0]


def test_a_layer_without_tokens_keeps_none_and_makes_room() -> None:
    nothing = torch.zeros(2, 3, 0, 4)
    held = DenseHeld(nothing, nothing, ("sums",), width=1)
    slots = held.keep(torch.zeros(2, 3, 0, dtype=torch.bool), spare=1)
    assert (slots.shape, held.capacity) == ((2, 3, 0), 1)
    held.append(torch.ones(2, 3, 1, 4), torch.ones(2, 3, 1, 4), torch.zeros(2, 1), absent=False)
    assert held.capacity == 1
    assert held.positions.tolist() == [[[0]] * 3] * 2
