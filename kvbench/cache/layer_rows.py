"""Slots of several layers, each with flat storage of its own, read or written together.

Shapes: L layers, N flat slots of a layer, n slots of each layer, W numbers of a slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class LayerRows:
    """Flat storage [N,W] of one dtype and width, layer by layer."""

    def __init__(self, layers: Sequence[Tensor]) -> None:
        self.layers = list(layers)

    def read(self, where: Tensor, layers: Sequence[int]) -> Tensor:
        """Slots where [l,n] of l of the layers: [l,n,W]."""
        return torch.stack([self.layers[layer][own] for layer, own in zip(layers, where, strict=True)])

    def write(self, where: Tensor, rows: Tensor, layers: Sequence[int]) -> None:
        """Put rows [l,n,W] into slots where [l,n] of l of the layers; no slot is named twice."""
        for layer, own, new in zip(layers, where, rows, strict=True):
            self.layers[layer].index_copy_(0, own, new.to(self.layers[layer].dtype))
