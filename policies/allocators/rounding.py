"""Whole numbers from real shares."""

import torch
from torch import Tensor


def largest_remainders(targets: Tensor, totals: Tensor, caps: Tensor) -> Tensor:
    """Whole numbers near real targets [B,n], each row summing to totals [B], none above caps [B,n] or below 0.

    The targets of a row sum to at most its total, up to rounding errors.

    Targets are rounded down first. The missing units go, one each, to the largest remainders (ties: the lower index),
    in rounds while counts are below their caps. A total above the sum of the caps gives the caps.
    """
    # Remainders that differ only by rounding of the arithmetic are ties.
    targets = targets.double().clamp(min=0)
    floors = (targets + 1e-9).floor()
    counts = torch.minimum(floors.long(), caps)
    remainders = ((targets - floors) * 1e9).round()
    wanted = torch.minimum(totals, caps.sum(-1))
    while bool((missing := wanted - counts.sum(-1)).gt(0).any()):
        open_ = counts < caps
        order = remainders.masked_fill(~open_, -torch.inf).argsort(dim=-1, descending=True, stable=True)
        places = torch.arange(order.shape[-1], device=order.device).expand_as(order)
        ranks = torch.empty_like(order).scatter_(-1, order, places)
        counts = counts + ((ranks < missing[:, None]) & open_)
        remainders = torch.zeros_like(remainders)
    return counts
