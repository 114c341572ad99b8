"""transformers' cache as presses of kvpress compress it.

Shapes: B batch, L layers, H_kv KV heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvbench.cache.cache import KVCache
from kvbench.cache.layer import stacked


def kept_by_layer(cache: KVCache | PressedCache) -> list[Tensor]:
    """[B,H_kv] tokens held by each layer that has any; of presses masked ones too."""
    if isinstance(cache, KVCache):
        return [layer.kept_tokens().cpu() for layer in cache.attention_layers]
    return [torch.full(layer.keys.shape[:2], layer.keys.shape[2]) for layer in cache.read]


class PressedCache(DynamicCache):
    """A transformers cache whose tokens per KV head and bytes are counted from its tensors.

    buffer_nbytes: bytes of hidden states or scores that a press keeps while decoding. masked: [L][H_kv] held tokens
    whose keys the press masks; None if it masks none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.peak_nbytes = 0
        self.buffer_nbytes = 0
        self.masked: list[list[int]] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, and of the press's buffer."""
        held: int = sum(x.nbytes for layer in self.read for x in (layer.keys, layer.values))
        return held + self.buffer_nbytes

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
        """[L,B,H_kv] tokens held, masked ones too. ValueError where layers differ in their number of KV heads."""
        return stacked(kept_by_layer(self))

    def note_bytes(self) -> None:
        """Keep the peak true."""
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)

    @property
    def read(self) -> list[Any]:
        """The layers that hold something."""
        return [layer for layer in self.layers if getattr(layer, "keys", None) is not None]
