"""The class that stores of codes derive from."""

from torch import Tensor

from kvbench.policies.stores.block_layer import BlockLayer
from kvbench.policies.stores.coding import Coding
from kvbench.policies.stores.ring_layout import RingLayer
from kvbench.policies.stores.store import LayerStore
from kvbench.policies.stores.token_codes import TokenCodeLayer


class Codec(Coding):
    """A store of codes: `encode` and `decode`, and `due` for tokens that are coded together."""

    def open(self, keys: Tensor, values: Tensor, statistics: tuple[str, ...], width: int) -> LayerStore:
        layer = TokenCodeLayer if not self.grouped else RingLayer if self.most_exact else BlockLayer
        return layer(self, keys, values, statistics, width)
