"""A queue behaves like a list."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.policies.stores.columns import Queue


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=12))
def test_a_queue_is_a_list(steps: list[tuple[int, int]]) -> None:
    queue, expected = Queue(growth=3), torch.zeros(2, 2, 0)
    for number, (entering, gone) in enumerate(steps):
        new = 100 * number + torch.arange(4.0 * entering).view(2, 2, entering)
        queue.append({"x": new, "y": -new[..., None]})
        expected = torch.cat([expected, new], dim=2)
        gone = min(gone, expected.shape[2])
        queue.drop(gone)
        expected = expected[:, :, gone:]
        assert queue.count == expected.shape[2]
        assert torch.equal(queue.view("x"), expected)
        assert torch.equal(queue.view("y")[..., 0], -expected)
        assert queue.nbytes - queue.spare_nbytes == 2 * expected.nbytes
