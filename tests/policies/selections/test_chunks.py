"""Chunks of neighbours: sets by hand, budgets to the token, kvpress's own."""

import pytest
import torch
from kv_crafted import Crafted, chosen, drawn
from kvpress_kept import assert_same, presses

from kvbench import make_policy
from kvbench.policies.ranking import Ranking
from kvbench.policies.selections.chunks import Chunks


def ranked(scores: list[list[float]], positions: list[list[int]], stays: set[int] = frozenset()) -> Ranking:
    """One sequence: scores and positions of every KV head; `stays` are protected positions."""
    places = torch.tensor([positions])
    protected = torch.tensor([[[p in stays for p in head] for head in positions]])
    return Ranking(torch.tensor([scores]), None, places, protected, torch.tensor([places.max() + 1]))


def test_the_chunks_with_the_highest_mean_stay_and_the_last_one_gives_its_best() -> None:
    """Means 2, 3, 1.5 and, of one token, 2.5: the order is chunk 1, chunk 3, chunk 0, chunk 2."""
    one = ranked([[1.0, 2, 3, 3, 3, 3, 2, 1, 1.5, 2.5]], [list(range(10))])
    order = Chunks(length=3).rank(one)
    assert chosen(order, 3) == [[3, 4, 5]]
    assert chosen(order, 4) == [[3, 4, 5, 9]]
    assert chosen(order, 6) == [[1, 2, 3, 4, 5, 9]]
    assert chosen(order, 7) == [[0, 1, 2, 3, 4, 5, 9]]
    by_sum = Chunks(length=3, reduce="sum").rank(one)
    assert chosen(by_sum, 4) == [[2, 3, 4, 5]], "sums 6, 9, 4.5 and 2.5"


def test_heads_share_their_chunks_or_have_their_own() -> None:
    """Head means: 4 and 1, 1 and 2; of both together 2.5 and 1.5."""
    heads = ranked([[4.0, 4, 1, 1], [1.0, 1, 2, 2]], [[0, 1, 2, 3]] * 2)
    assert chosen(Chunks(length=2).rank(heads), 2) == [[0, 1], [0, 1]]
    assert chosen(Chunks(length=2, heads="own").rank(heads), 2) == [[0, 1], [2, 3]]


def test_chunks_follow_positions_not_slots() -> None:
    """Slots out of order, one empty, tokens 1 and 4 gone: chunks {0}, {2, 3}, {5} have means 1, 4 and 2."""
    order = Chunks(length=2).rank(ranked([[2.0, 3, 9, 5, 1]], [[5, 2, -1, 3, 0]]))
    assert chosen(order, 2) == [[2, 3]]
    assert chosen(order, 3) == [[2, 3, 5]]
    assert int(order.victim()) == 4


def test_a_chunk_that_is_protected_in_part_is_completed_first() -> None:
    """Token 7 stays: its chunk's mean is then (0 + 5) / 2, above all but the first, whose tokens have 5 and 4."""
    order = Chunks(length=2).rank(ranked([[5.0, 4, 2, 2, 1, 1, 0, 0]], [list(range(8))], stays={7}))
    assert chosen(order, 3) == [[0, 1, 7]]
    assert chosen(order, 4) == [[0, 1, 6, 7]]


def test_while_decoding_the_worst_chunk_loses_its_worst_token() -> None:
    _, keys, values = drawn(13, 1, 1)
    scores = (-keys[0, 0].norm(dim=-1)).tolist()
    made = Crafted(make_policy("chunkkv_knorm", 6, length=3, decode="evict"), 1, 1, prompt_length=6)
    made.call(*(x[:, :, :6] for x in (keys, keys, values)))
    held = list(range(6))
    for new in range(6, 13):
        held.append(new)
        chunks = [[p for p in held if p // 3 == m] for m in range(5)]
        worst = min((c for c in chunks if c), key=lambda c: sum(scores[p] for p in c) / len(c))
        held.remove(min(worst, key=lambda p: scores[p]))
        made.call(*(x[:, :, new : new + 1] for x in (keys, keys, values)))
        assert made.kept() == [tuple(held)]


@pytest.mark.parametrize("slug", ["knorm", "snapkv"])
def test_kept_sets_are_those_of_kvpress_where_lengths_divide(slug: str) -> None:
    """A window of 20 cuts no chunk of 10: of a chunk that is cut kvpress may lose a part."""
    kvpress = presses()
    inner = {"knorm": kvpress.KnormPress, "snapkv": kvpress.SnapKVPress}[slug]()
    fields = {}
    if slug == "snapkv":
        inner.window_size, inner.kernel_size = 20, 5
        fields = {"window": 20, "kernel": 5, "pool": "avg"}
    assert_same(f"chunkkv_{slug}", kvpress.ChunkKVPress(inner, chunk_length=10), 60, 120, **fields)
