"""Tensors of slots are taken, stacked and owned as what they are, however they lie in memory."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbench.kernels import selection
from kvbench.kernels.selection import take
from kvbench.policies.stores.slots import owned, padded

LAYOUTS = {
    "a row after another": lambda x: x,
    "as a projection leaves them": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "in front of room": lambda x: torch.cat([x, torch.full_like(x, 99.0)], dim=2)[:, :, : x.shape[2]],
    "behind others": lambda x: torch.cat([torch.full_like(x, 99.0), x], dim=2)[:, :, x.shape[2] :],
    "beside others": lambda x: torch.cat([x, torch.full_like(x, 99.0)[..., :1]], dim=3)[..., :-1],
    "the same for all heads": lambda x: x[:, :1].expand_as(x),
    "numbers far apart": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
}


@pytest.fixture(params=[selection.MANY, 1], ids=["few", "many"])
def many(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many numbers are copied by rows, with these small tensors too."""
    monkeypatch.setattr(selection, "MANY", request.param)


@pytest.mark.usefixtures("many")
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    batch, heads, length, _ = shape
    x = layout(torch.randn(shape))
    chosen = torch.randint(length, (batch, heads, most))
    taken = take(x, chosen)
    assert taken.shape == (batch, heads, most, shape[3])
    for b, h in torch.cartesian_prod(torch.arange(batch), torch.arange(heads)).tolist():
        rows = [x[b, h, slot].tolist() for slot in chosen[b, h].tolist()]
        assert taken[b, h].tolist() == rows


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5)), min_size=1, max_size=4), st.sampled_from([2, -1]))
def test_padding_fills_up_and_moves_nothing(shapes: list[tuple[int, int]], dim: int) -> None:
    parts = [torch.arange(rows * n * 6).view(rows, 2, n, 3) for rows, n in shapes]
    parts = parts if dim == 2 else [part.transpose(2, 3) for part in parts]
    whole, row, most = padded(parts, fill=-1, dim=dim), 0, max(n for _, n in shapes)
    assert whole.shape == (sum(rows for rows, _ in shapes), 2, *((most, 3) if dim == 2 else (3, most)))
    for part, (rows, n) in zip(parts, shapes, strict=True):
        own, row = whole[row : row + rows], row + rows
        assert torch.equal(own.narrow(dim, 0, n), part)
        assert (own.narrow(dim, n, most - n) == -1).all()


def test_a_tensor_is_copied_only_where_it_keeps_more_alive_than_itself() -> None:
    heads = torch.rand(1, 5, 4, 8)
    for own in (heads, heads.transpose(1, 2)):  # as projections give their values
        assert owned(own).data_ptr() == own.data_ptr()
    for view in (heads[:, :3], heads[..., :4], heads.transpose(1, 2)[:, :2]):
        copied = owned(view)
        assert torch.equal(copied, view)
        assert copied.untyped_storage().nbytes() == view.nbytes
