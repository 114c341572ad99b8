"""The most memory that was allocated on the CUDA devices, as PyTorch's allocator counts it."""

import torch


def forget_peak(device: torch.device) -> None:
    """Start to look for a new peak; on a device without such a count nothing happens."""
    if device.type == "cuda":
        for index in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(index)


def peak(device: torch.device) -> int | None:
    """Bytes allocated at the peak since `forget_peak`, weights included, over all CUDA devices; None elsewhere."""
    if device.type != "cuda":
        return None
    return sum(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count()))
