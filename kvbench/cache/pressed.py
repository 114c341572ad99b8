"""transformers' cache as presses of kvpress compress it.

Shapes: B batch, L layers, H_kv KV heads.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache


class PressedCache(DynamicCache):
    """What tables tell of a cache, tokens per KV head and bytes, counted from its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.peak_nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its keys and values."""
        return sum(x.nbytes for layer in self._read for x in (layer.keys, layer.values))

    @property
    def held_nbytes(self) -> int:
        """The same: it reserves none."""
        return self.nbytes

    @property
    def state_nbytes(self) -> int:
        """Bytes of recurrent layers' states: models that have any are refused."""
        return 0

    @property
    def spare_nbytes(self) -> int:
        """Bytes reserved but unused."""
        return 0

    def kept_tokens(self) -> Tensor:
        """[L,B,H_kv] tokens held, masked ones too."""
        return torch.stack([torch.full(layer.keys.shape[:2], layer.keys.shape[2]) for layer in self._read])

    def note_bytes(self, *_: object) -> None:
        """Keep the peak true."""
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)

    @property
    def _read(self) -> list[Any]:
        """The layers that hold something."""
        return [layer for layer in self.layers if getattr(layer, "keys", None) is not None]
