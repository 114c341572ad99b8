"""What a generated batch came to, and the clock of its seconds."""

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from kvbench.cache.cache import KVCache
from kvbench.cache.pressed import PressedCache


@dataclass(frozen=True)
class Generation:
    """What came out of one batch: new tokens of each sequence (EOS left out), the cache as it ended, and seconds.

    prefill_seconds: until the first token is known, evictions of the prompt and a question after its context included.
    decode_seconds: all later tokens, in decode_steps calls of the model.
    """

    tokens: list[list[int]]
    cache: KVCache | PressedCache
    prefill_seconds: float
    decode_seconds: float
    decode_steps: int


def _places(model: PreTrainedModel) -> Iterable[torch.device | str | int]:
    """Where the layers lie: on one device, or as accelerate spread them."""
    spread = getattr(model, "hf_device_map", None)
    return spread.values() if spread else [model.device]


def now(model: PreTrainedModel) -> float:
    """Seconds on a monotonic clock, after the devices have finished what they were given."""
    for device in {torch.device(where) for where in _places(model) if where not in ("cpu", "disk")}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return time.perf_counter()
