"""Queues whose heads have lengths of their own behave like one list per head."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.policies.stores.queue import Queue

STEP = st.tuples(st.integers(1, 5), st.lists(st.integers(0, 5), min_size=4, max_size=4), st.integers(0, 4))


@settings(max_examples=60)
@given(st.lists(STEP, min_size=1, max_size=12), st.booleans())
def test_a_queue_is_a_list_per_head(steps: list[tuple[int, list[int], int]], even: bool) -> None:
    queue, lists, number = Queue(growth=3), [[] for _ in range(4)], 0
    for entering, wanted, gone in steps:
        new = torch.arange(number, number + 4 * entering).view(2, 2, entering)
        number += 4 * entering
        counts = [entering] * 4 if even else [min(entering, w) for w in wanted]
        queue.append({"x": new, "y": -new[..., None].float()}, None if even else torch.tensor(counts).view(2, 2))
        for head, count, entries in zip(lists, counts, new.view(4, -1).tolist(), strict=True):
            head += entries[:count]
        drops = [min(gone, len(head)) for head in lists]
        queue.drop(drops[0] if queue.counts is None else torch.tensor(drops).view(2, 2))
        lists = [head[drop:] for head, drop in zip(lists, drops, strict=True)]
        assert queue.lengths().flatten().tolist() == [len(head) for head in lists]
        assert queue.most == max(map(len, lists))
        for row, head in zip(queue.view("x").reshape(4, -1).tolist(), lists, strict=True):
            assert row[: len(head)] == head
        for row, head in zip(queue.view("y").reshape(4, -1).tolist(), lists, strict=True):
            assert row[: len(head)] == [-x for x in head]
