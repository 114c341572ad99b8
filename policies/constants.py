"""Small tensors of the host's numbers on a device, and of a device's on the host, without a wait of the host."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kvbench.kernels.devices import on_gpu, on_host

_RECORDED: dict[int, Tensor] = {}
"""Constants whose addresses are in recorded CUDA graphs, so that they are never freed."""


def on_device(numbers: tuple[int, ...] | tuple[bool, ...], device: torch.device) -> Tensor:
    """Whole numbers or flags as a cached tensor [n], int64 or bool. Do not modify it in place."""
    flags = all(isinstance(number, bool) for number in numbers)
    found = _constant(numbers, torch.bool if flags else torch.int64, device)
    if on_gpu(device) and torch.cuda.is_current_stream_capturing():
        _RECORDED[id(found)] = found
    return found


def changing(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Whole numbers that differ from step to step as a tensor [n], int64."""
    if len(set(numbers)) == 1:
        return torch.full((len(numbers),), numbers[0], device=device)
    pinned = torch.tensor(numbers, dtype=torch.int64, pin_memory=on_gpu(device))
    return pinned.to(device, non_blocking=True)


def is_checked(tokens: Tensor) -> bool:
    """Whether the numbers of tokens [B,H,N,...] are checked: not at every decoded token, if the host would wait."""
    return not tokens.is_meta and (tokens.shape[2] > 1 or on_host(tokens))


@dataclass(frozen=True)
class OnItsWay:
    """A small tensor that is being copied to the host; the copy does not wait for the device."""

    copy: Tensor
    done: torch.cuda.Event | None

    def __call__(self) -> Tensor:
        """The tensor on the host."""
        if self.done is not None:
            self.done.synchronize()
        return self.copy


def on_its_way(x: Tensor) -> OnItsWay:
    """Begin to copy a tensor to the host."""
    if not on_gpu(x.device):
        return OnItsWay(x, None)
    copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(x.device))
    return OnItsWay(copy, done)


@lru_cache(maxsize=1024)
def _constant(numbers: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The dtype is part of the key: (True, False) and (1, 0) are equal."""
    with torch.inference_mode(False):  # an inference tensor could not be used outside of inference mode
        return torch.tensor(numbers, dtype=dtype, device=device)
