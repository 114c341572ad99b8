"""Budgets per KV head: AdaKV, HeadKV and the rounding they share. Expected counts are worked by hand."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbench import make_policy
from kvbench.policies.allocators.ada import Ada
from kvbench.policies.allocators.headkv import HeadKV
from kvbench.policies.allocators.rounding import largest_remainders
from kvbench.policies.ranking import Ranking


def ranking(scores: list[list[float]], newest: int = 0) -> Ranking:
    """One sequence; the last `newest` tokens of every head are protected."""
    table = torch.tensor([scores], dtype=torch.float32)
    positions = torch.arange(table.shape[2]).expand_as(table)
    protected = positions >= table.shape[2] - newest
    return Ranking(table, None, positions, protected, torch.tensor([table.shape[2]]))


SCORES = [[9, 1, 8, 7, 5, 2], [4, 3, 6, 1, 1, 1]]


@pytest.mark.parametrize(
    ("rounding", "alpha", "counts"),
    [
        ("exact", 0.0, [4, 2]),  # the six best are 9 8 7 6 5 4
        ("exact", 0.2, [4, 2]),  # targets 3.8 and 2.2
        ("exact", 0.5, [4, 2]),  # targets 3.5 and 2.5: a tie of remainders goes to the lower head
        ("exact", 1.0, [3, 3]),
        ("official", 0.2, [3, 2]),  # int(0.6) = 0, so 3.2 and 1.6 are rounded: one slot is lost
        ("official", 0.5, [3, 2]),
        ("kvpress", 0.2, [4, 2]),
    ],
)
def test_ada_deals_a_layer_by_hand(rounding: str, alpha: float, counts: list[int]) -> None:
    got = Ada(alpha=alpha, rounding=rounding).heads(0, ranking(SCORES), [3])
    assert got.tolist() == [counts]


def test_ada_leaves_the_protected_window_out_of_the_competition() -> None:
    scores = [[9, 1, 8, 7, 5, 2, 99], [4, 3, 6, 1, 1, 1, 99]]
    assert Ada(alpha=0.2).heads(0, ranking(scores, newest=1), [4]).tolist() == [[5, 3]]


def test_equal_scores_of_two_heads_go_to_the_lower_position_then_to_the_lower_head() -> None:
    scores = [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]
    assert Ada(alpha=0.0).heads(0, ranking(scores), [1]).tolist() == [[1, 1, 1]]
    assert Ada(alpha=0.0).heads(0, ranking([[1, 1, 1, 1], [0, 1, 1, 1]]), [2]).tolist() == [[3, 1]]


@settings(max_examples=80)
@given(
    targets=st.lists(st.floats(0, 40), min_size=1, max_size=8),
    caps=st.lists(st.integers(0, 50), min_size=8, max_size=8),
    extra=st.integers(0, 30),
)
@example(targets=[0.0, 1.999999999999993], caps=[0, 2, 0, 0, 0, 0, 0, 0], extra=0)
def test_largest_remainders_reach_the_total_inside_the_caps(targets: list[float], caps: list[int], extra: int) -> None:
    limit = torch.tensor([caps[: len(targets)]])
    total = int(sum(targets) + 1e-6) + extra  # targets a rounding error below a whole number stand for it
    counts = largest_remainders(torch.tensor([targets], dtype=torch.float64), torch.tensor([total]), limit)
    assert bool((counts <= limit).all())
    assert int(counts.sum()) == min(total, int(limit.sum()))


def importance(path: Path, table: list[list[float]]) -> str:
    path.write_text(json.dumps({f"{la}-{h}": [x] for la, row in enumerate(table) for h, x in enumerate(row)}))
    return str(path)


@pytest.mark.parametrize(
    ("beta", "caps"), [(1.005, [287, 144, 49, 1]), (1.5, [232, 136, 72, 40]), (10, [137, 122, 113, 108])]
)
def test_headkv_deals_the_pool_by_importance(tmp_path: Path, beta: float, caps: list[int]) -> None:
    # Heads 6:3:1:0, budget 128 with a window of 8. The printed caps round each head by itself (481 of 480 at 1.005).
    allocator = HeadKV(importance=importance(tmp_path / "i.json", [[6, 3, 1, 0]]), beta=beta)
    table = torch.rand(4, 600, generator=torch.Generator().manual_seed(0)).tolist()
    assert allocator.split(128, 1, 600, 8) == [128]
    counts = (allocator.heads(0, ranking(table, newest=8), [128]) - 8)[0]
    assert int(counts.sum()) == 480
    assert int((counts - torch.tensor(caps)).abs().max()) <= 1


def test_headkv_averages_a_group_and_conserves_the_total_over_layers(tmp_path: Path) -> None:
    path = importance(tmp_path / "i.json", [[4, 0, 1, 1], [1, 1, 0, 0]])
    allocator = HeadKV(importance=path, beta=1.005)
    layers = allocator.split(64 * 2, 2, 500, 8)
    assert sum(layers) == 128
    assert layers[0] > layers[1]
    table = torch.rand(2, 500).tolist()
    counts: Tensor = allocator.heads(0, ranking(table, newest=8), [layers[0]])
    assert int(counts.sum()) == 2 * layers[0]
    assert int(counts[0, 0]) > int(counts[0, 1])


@pytest.mark.parametrize(
    "text", ["[1, 2]", '{"0-0": "x"}', '{"0-0": [1], "1-1": [1]}', '{"0-0": [0]}', "not json", '{"a-b": [1]}']
)
def test_a_bad_importance_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"bad\.json"):
        make_policy("headkv_r", 64, importance=str(path))
