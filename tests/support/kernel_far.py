"""Arguments of kernels whose entries lie so far apart that the last ones are beyond 2^31 numbers of a tensor."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvbench.kernels.quantised_attention import Side

BEYOND = 2**31
NUMPY = {
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.bool: np.bool_,
}


def far(x: Tensor, dim: int) -> Tensor:
    """The same numbers, the entries of a dimension some 2^31 / (entries - 1) numbers apart.

    Of the memory between them, zeros that nobody has written yet, no page is ever touched.
    """
    apart = x.movedim(dim, 0)
    each = apart[0].numel()
    step = -(-BEYOND // (len(apart) - 1) // 16) * 16
    assert each <= step
    memory = torch.from_numpy(np.zeros((len(apart) - 1) * step + each, NUMPY[x.dtype]))
    rows = memory.as_strided(apart.shape, (step, *apart[0].contiguous().stride()))
    return rows.copy_(apart).movedim(0, dim)


def from_afar(launcher: Callable[..., Any], call: dict[str, Any], names: Collection[str], dim: int) -> Any:
    """What a launcher gives where these of its arguments lie far apart, inside others too."""

    def moved(name: str, x: Any) -> Any:
        if isinstance(x, dict):
            return {inside: moved(inside, y) for inside, y in x.items()}
        if isinstance(x, Side) and name in names:
            parts = {part: far(getattr(x.packed, part), dim) for part in ("words", "scale", "minimum")}
            return replace(x, packed=replace(x.packed, **parts), tail=far(x.tail, dim))
        return far(x, dim) if name in names else x

    return launcher(**{name: moved(name, x) for name, x in call.items()})
