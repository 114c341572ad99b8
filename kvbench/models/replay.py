"""Which decoding steps can be recorded as a CUDA graph: conditions on the policy and the device."""

import torch

from kvbench.cache.joining import can_record
from kvbench.models.devices import records_steps
from kvbench.policies.policy import Policy


def records(policy: Policy, device: torch.device) -> bool:
    """Whether decoding steps of this policy on this device can be recorded."""
    return records_steps(device) and can_record(policy)


def check_graph(policy: Policy, device: torch.device) -> None:
    """Raise ValueError unless decoding steps of this policy on this device can be recorded."""
    if not records_steps(device):
        raise ValueError(f"engine.cuda_graph=true needs a CUDA device, got device={device.type}")
    if not can_record(policy):
        raise ValueError(
            "engine.cuda_graph=true needs keys and values per KV head, exact or in codes that kernels read, and steps "
            f"that attend, then evict; {policy.name} does not support it: use engine.cuda_graph=false"
        )
