"""The dense store: keys and values as the model made them, as many in every KV head."""

from dataclasses import dataclass

from torch import Tensor

from kvbench.policies.stores.slot_store import SlotStore
from kvbench.policies.stores.store import LayerStore, Store


@dataclass(frozen=True)
class Dense(Store):
    """Keys and values as the model made them, in its dtype."""

    exact = True
    replayable = True

    def open(self, keys: Tensor, values: Tensor, statistics: tuple[str, ...], width: int) -> LayerStore:
        return SlotStore(keys, values, statistics, width)
