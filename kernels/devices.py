"""What depends on the device of a tensor: who computes, how much at once, and whether the host waits for a number.

Kernels and policies ask here; the cache asks its backend (`kvbench.cache.attend`), and the settings of a run
`kvbench.models.devices`.
"""

from __future__ import annotations

import os
from functools import lru_cache

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
LITTLE = 99 * 1024  # bytes of shared memory that a block can have on any GPU since 2020
LARGE = 2**26  # numbers of a piece on a GPU: 256 MiB, enough work for one launch; not measured


def use_triton(*tensors: Tensor) -> bool:
    """Whether Triton computes with these: CUDA tensors, or all tensors if it is interpreted, except float64."""
    return all((x.is_cuda or INTERPRETED) and x.dtype != torch.float64 for x in tensors)


def decodes(queries: Tensor) -> bool:
    """Whether a step of queries [B,H_q,M,D] is computed by the kernel: one query, on a GPU, without gradients."""
    return queries.shape[2] == 1 and use_triton(queries) and not (torch.is_grad_enabled() and queries.requires_grad)


def on_host(x: Tensor) -> bool:
    """Whether x is in host memory, so that the host reads its elements without a wait."""
    return x.device.type == "cpu"


def on_gpu(device: torch.device) -> bool:
    """Whether a device is one of CUDA."""
    return device.type == "cuda"


def numbers_at_once(like: Tensor, cached: int) -> int:
    """How many numbers a piece of a computation has: `cached` on a CPU, so that they stay in its cache."""
    return cached if on_host(like) else LARGE


def multipliable(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors of one dtype whose values kernels multiply: Triton's interpreter takes the bit patterns of bfloat16."""
    interpreted = tensors[0].dtype == torch.bfloat16 and not tensors[0].is_cuda
    return tuple(x.float() for x in tensors) if interpreted else tensors


def runs_assembly() -> bool:
    """Whether kernels may contain instructions of a GPU: not if they are interpreted."""
    return not INTERPRETED


def converts_float8(x: Tensor) -> bool:
    """Whether a GPU converts numbers of type e4m3 by an instruction."""
    return not INTERPRETED and x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 9)


@lru_cache(maxsize=64)
def programs_at_once(device: torch.device) -> int:
    """The number of programs that a device runs at once: two per SM, given their shared memory; few if interpreted."""
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count if on_gpu(device) else 8


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a block can have on this device."""
    if not on_gpu(device):
        return LITTLE
    known = torch.cuda.get_device_properties(device)  # cached by PyTorch
    return int(getattr(known, "shared_memory_per_block_optin", LITTLE))
