"""KCVC: both per channel, on the schedule of KIVI's keys."""

import torch
from kv_stores import feed

from kvbench.policies.stores.kivi import Kcvc


def test_values_per_channel_by_hand() -> None:
    values = torch.tensor([[[[4.0, 0], [1, 3], [2, -1], [-3, 2]]]])
    held = feed(Kcvc(group=4, residual=4), values, values)
    expected = [[4, 1 / 3], [5 / 3, 3], [5 / 3, -1], [-3, 5 / 3]]
    torch.testing.assert_close(held.values[0, 0], torch.tensor(expected))
    torch.testing.assert_close(held.keys[0, 0], torch.tensor(expected))
