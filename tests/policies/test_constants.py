"""Constants on a device: made once, and never one for another."""

import torch

from kvbench.policies.constants import on_device


def test_flags_and_numbers_of_equal_value_are_different_constants() -> None:
    cpu = torch.device("cpu")
    numbers, flags = on_device((1, 0), cpu), on_device((True, False), cpu)
    assert (numbers.dtype, flags.dtype) == (torch.int64, torch.bool)
    assert on_device((1, 0), cpu) is numbers
