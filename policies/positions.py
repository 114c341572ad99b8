"""Sums over the slots that hold the same part of the text, wherever these slots are.

Shapes: B batch, H KV heads, T slots, N slots of a row.
"""

import torch
from torch import Tensor

from kvbench.kernels.selection import LAST
from kvbench.policies.observation import Observation


def groups(labels: Tensor) -> Tensor:
    """For every slot, the number of its label [...,N] among the labels that exist, from 0. Nothing waits for a GPU."""
    order = labels.argsort(dim=-1, stable=True)
    ordered = labels.gather(-1, order)
    begins = torch.nn.functional.pad(ordered[..., 1:] != ordered[..., :-1], (1, 0))
    return torch.empty_like(order).scatter_(-1, order, begins.cumsum(-1))


def group_sums(labels: Tensor, *numbers: Tensor) -> list[Tensor]:
    """For every slot, the sum of numbers [...,N] over the slots with its label [...,N]; computed in float64.

    float64 makes rounding independent of the order of additions.
    """
    group = groups(labels)
    return [torch.zeros_like(x).scatter_add_(-1, group, x).gather(-1, group) for x in (y.double() for y in numbers)]


def sum_over_heads(x: Tensor, observation: Observation) -> Tensor:
    """For every token, the sum of x [B,H,T] over the KV heads that hold it, [B,1 or H,T].

    x has one head if all heads hold one token set. After an eviction, heads hold different tokens in a slot, which are
    matched by position.
    """
    if x.shape[1] == 1 or (observation.slots.whole and observation.phase != "decode"):
        return x.sum(1, keepdim=True)
    labels = observation.positions.long().masked_fill(~observation.occupied, LAST).flatten(1)
    (found,) = group_sums(labels, x.masked_fill(~observation.occupied, 0.0).flatten(1))
    return found.view_as(x).to(x.dtype)
