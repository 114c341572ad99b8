"""KCVC: both per channel, on the schedule of KIVI's keys."""

import torch
from kv_stores import feed, stream

from kvbench.policies.stores.kcvc import Kcvc


def test_values_per_channel_by_hand() -> None:
    values = torch.tensor([[[[4.0, 0], [1, 3], [2, -1], [-3, 2]]]])
    held = feed(Kcvc(group=4, residual=4), values, values)
    expected = [[4, 1 / 3], [5 / 3, 3], [5 / 3, -1], [-3, 5 / 3]]
    torch.testing.assert_close(held.values[0, 0], torch.tensor(expected))
    torch.testing.assert_close(held.keys[0, 0], torch.tensor(expected))


def test_keys_and_values_keep_the_same_tokens_exact() -> None:
    keys, values = stream(300)
    held = feed(Kcvc(group=32, residual=128), keys, values)
    for view, x in ((held.keys, keys), (held.values, values)):
        assert torch.equal(view[:, :, 256:], x[:, :, 256:])
        assert not bool((view[:, :, :256] == x[:, :, :256]).all(-1).any())


def test_without_groups_the_prompt_shares_one_scale_per_channel_and_every_later_block_has_its_own() -> None:
    keys, values = stream(300, dim=16)
    held = feed(Kcvc(group=None, residual=100), keys, values, [250] + [1] * 50)
    for x, view in ((keys, held.keys), (values, held.values)):
        for block, levels in ((slice(0, 200), 4), (slice(200, 300), 4)):
            step = (x[:, :, block].amax(2, keepdim=True) - x[:, :, block].amin(2, keepdim=True)) / 3
            codes = (view[:, :, block] - x[:, :, block].amin(2, keepdim=True)) / step
            torch.testing.assert_close(codes, codes.round(), rtol=0, atol=1e-4)
            assert len(codes.round().unique()) == levels
    assert held.parts()["scales and minima"] == 2 * 2 * 2 * 2 * 16 * 4  # K and V, scale and minimum, 2 blocks, 2 heads
