"""Small numbers that kernels compare with, copied to a device once: every copy from the host makes a GPU wait."""

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=1024)
def on_device(numbers: tuple[int, ...] | tuple[bool, ...], device: torch.device) -> Tensor:
    """Whole numbers or flags as a tensor [n], int64 or bool; the same one at every call, not to be changed in place."""
    with torch.inference_mode(False):  # else it could not be used outside of inference mode
        return torch.tensor(numbers, device=device)
