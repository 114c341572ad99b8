"""The class that stores of codes derive from."""

from torch import Tensor

from kvbench.policies.stores.coding import Coding
from kvbench.policies.stores.column_layer import ColumnLayer
from kvbench.policies.stores.store import LayerStore
from kvbench.policies.stores.token_codes import TokenCodeLayer


class Codec(Coding):
    """A store of codes: `encode` and `decode`, and `due` for tokens that are coded together."""

    def open(self, keys: Tensor, values: Tensor, statistics: tuple[str, ...], width: int) -> LayerStore:
        layer = ColumnLayer if self.grouped else TokenCodeLayer
        return layer(self, keys, values, statistics, width)
