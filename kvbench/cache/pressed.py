"""The transformers cache of kvpress's presses.

Shapes: B batch, L layers, H_kv KV heads.
"""

from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvbench.cache.footprint import fed
from kvbench.cache.views import stacked


class PressedCache(DynamicCache):
    """A transformers cache with the sizes of a KVCache, counted from its tensors.

    seen: tokens seen. entries: of the footprint (`kvbench.cache.footprint`), without passes of the press itself.
    buffer_nbytes: bytes of hidden states or scores that a press holds while decoding. masked:
    [L][H_kv] held tokens with keys that the press masks; None if it masks none.
    """

    spare_nbytes = state_nbytes = 0  # no memory is reserved, and models with recurrent layers are refused

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.entries = 0.0
        self.peak_nbytes = 0
        self.buffer_nbytes = 0
        self.masked: list[list[int]] | None = None

    @property
    def used_layers(self) -> list[Any]:
        """The layers with keys and values."""
        return [layer for layer in self.layers if getattr(layer, "keys", None) is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, and of the press's buffer."""
        held: int = sum(x.nbytes for layer in self.used_layers for x in (layer.keys, layer.values))
        return held + self.buffer_nbytes

    held_nbytes = nbytes

    def kept_by_layer(self) -> list[Tensor]:
        """[B,H_kv] tokens held by each layer, masked tokens included."""
        return [torch.full(layer.keys.shape[:2], layer.keys.shape[2]) for layer in self.used_layers]

    def kept_tokens(self) -> Tensor:
        """[L,B,H_kv] tokens held, masked tokens included. ValueError if layers differ in their number of KV heads."""
        return stacked(self.kept_by_layer())

    def feed(self, tokens: int) -> None:
        """Count the entries that the next call of `tokens` tokens finds."""
        held = [layer.keys.shape[2] for layer in self.used_layers]
        self.entries += fmean(fed(h, tokens) for h in held or [0])

    def note_bytes(self) -> None:
        """Update the peak."""
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
