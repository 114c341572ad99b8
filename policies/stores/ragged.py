"""The ragged store: every KV head holds its own number of tokens, and only their bytes."""

from dataclasses import dataclass

from torch import Tensor

from kvbench.policies.stores.slot_store import SlotStore
from kvbench.policies.stores.store import LayerStore, Store


@dataclass(frozen=True)
class Ragged(Store):
    """Keys and values as the model made them; every KV head of every sequence holds only its own tokens."""

    exact = True
    replayable = True

    def open(self, keys: Tensor, values: Tensor, statistics: tuple[str, ...], width: int) -> LayerStore:
        return SlotStore(keys, values, statistics, width, ragged=True)
