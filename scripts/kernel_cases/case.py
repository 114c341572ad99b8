"""What one benchmark case of a kernel is: inputs, who computes it, and the least a device must do for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

LEAST = 128  # tokens, which whole groups of codes divide


def scaled(tokens: int, scale: int) -> int:
    """A number of tokens for a smaller machine: divided by `scale`, a multiple of LEAST unless it was less."""
    return tokens if scale == 1 else min(tokens, max(LEAST, tokens // scale // LEAST * LEAST))


@dataclass(frozen=True)
class KernelCase:
    """One size of one kernel. The first provider is the yardstick of correctness; a wrong answer has no speed.

    setup makes the inputs on a device; a provider takes them by name. bytes_moved and flops are floors: every input
    read once, every output written once. tolerance bounds |out - yardstick| / |yardstick| over the whole output.
    beside: providers that compute something else, which is timed and not compared.
    """

    kernel: str
    label: str
    setup: Callable[[torch.device], dict[str, Any]]
    providers: dict[str, Callable[..., Any]]
    bytes_moved: int
    flops: int = 0
    tolerance: float = 1e-2
    beside: tuple[str, ...] = ()
