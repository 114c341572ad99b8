"""GEAR: its three parts, each with a case where it alone decides, and its ways with the prompt."""

import numpy as np
import torch
from kv_stores import feed, stream
from torch import Tensor

from kvbench.policies.stores.gear import Gear, extremes, low_rank


def test_entries_set_aside_are_the_extremes_each_once_even_among_ties() -> None:
    x = torch.tensor([[3.0, 0], [100, 0], [1, 0], [2, 50], [2, 0]])
    places = extremes(x, 2)
    assert places.dtype == torch.int16
    assert places[:, 0].sort().values.tolist() == [0, 1, 2, 3]  # 1 and 2 below, 3 and 100 above
    assert len(set(places[:, 1].tolist())) == 4
    assert 3 in places[:, 1]


def test_power_iteration_finds_the_best_low_rank_copy() -> None:
    torch.manual_seed(0)
    left, right = torch.randn(2, 100, 3), torch.randn(2, 16, 3) * torch.tensor([5.0, 3, 1])
    error = (left @ right.mT + 0.01 * torch.randn(2, 100, 16)).double()
    for rank in (1, 2, 3):
        q, p = low_rank(error, rank, loops=8, seed=0)
        best = torch.linalg.svdvals(error)[:, rank:].norm(dim=-1)
        lost = (error - q @ p.mT).flatten(1).norm(dim=-1)
        torch.testing.assert_close(lost, best, rtol=0.02, atol=1e-4)


def slow_codes(x: Tensor, bits: int) -> np.ndarray:
    """Rows of x quantised and back, one by one."""
    rows = x.double().numpy().copy()
    for row in rows.reshape(-1, rows.shape[-1]):
        low, step = row.min(), (row.max() - row.min()) / (2**bits - 1)
        row[:] = np.round((row - low) / step) * step + low
    return rows


def test_value_groups_run_over_the_channels_of_all_heads() -> None:
    keys, values = stream(64, heads=4, dim=8)
    store = Gear(group=16, rank=1, outlier_ratio=0.0)
    ((_, codes),) = feed(store, keys, values).blocks[1]
    flat = values.transpose(1, 2).reshape(64, 2, 16)  # a token's 32 channels in two groups of two heads each
    expected = slow_codes(flat, 2).reshape(64, 4, 8).swapaxes(0, 1)
    np.testing.assert_allclose(store.plain(codes, 1, 8)[0], expected, atol=1e-5)


def test_after_the_prompt_a_block_is_compressed_whenever_the_gap_is_full() -> None:
    keys, values = stream(170)
    held = feed(Gear(group=32, gap=50), keys, values, [100] + [1] * 69)
    assert [held.exact_of(side) for side in range(2)] == [19, 19]
    assert [[tokens for tokens, _ in side] for side in held.blocks] == [[100, 50], [100, 50]]
    assert torch.equal(held.values[:, :, 150:], values[:, :, 150:169])


def test_the_released_codes_ways_with_the_prompt_are_options() -> None:
    keys, values = stream(260)
    never = feed(Gear(group=32, gear_prompt="never"), keys, values, [150] + [1] * 110)
    assert torch.equal(never.values[:, :, :150], values[:, :, :150])
    assert never.in_codes == [250, 250]
    whole = Gear(group=32, gear_prompt="gap")
    before = feed(whole, keys, values, [150] + [1] * 49)
    assert torch.equal(before.values, values[:, :, :199])
    after = feed(whole, keys, values, [150] + [1] * 110)
    assert [[tokens for tokens, _ in side] for side in after.blocks] == [[200], [200]]
    assert after.exact_of(0) == 60


def test_bytes_are_those_of_the_formula() -> None:
    tokens, heads, dim, rank = 1024, 2, 128, 2
    held = feed(Gear(), *stream(tokens, heads=heads, dim=dim, dtype=torch.float16))
    numbers = 2 * tokens * heads * dim
    aside = heads * dim * 2 * int(tokens * 0.01 / 2) + tokens * 2 * int(heads * dim * 0.01 / 2)
    assert held.sizes().kinds == {
        "codes": numbers * 2 // 8,
        "scales and minima": numbers // 128 * 4,
        "full precision": 0,
        "positions": 0,
        "entries set aside": aside * (2 + 2),
        "low-rank factors": 2 * heads * rank * (tokens + dim) * 2,
    }
