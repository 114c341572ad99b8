"""Constants on a device: made once, and never one for another."""

import torch

from kvbench.policies.constants import on_device


def test_flags_and_numbers_of_equal_value_are_different_constants() -> None:
    cpu = torch.device("cpu")
    numbers, flags = on_device((1, 0), cpu), on_device((True, False), cpu)
    assert (numbers.dtype, flags.dtype) == (torch.int64, torch.bool)
    assert on_device((1, 0), cpu) is numbers


def test_a_constant_made_in_inference_mode_is_of_use_outside_of_it() -> None:
    with torch.inference_mode():
        inside = on_device((3, 5), torch.device("cpu"))
    assert (torch.ones(2, requires_grad=True) * inside).sum().requires_grad
