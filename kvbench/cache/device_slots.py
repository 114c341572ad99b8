"""Where the tokens of a `DeviceBatch` lie: one memory per layer for all sequences, lengths on the device.

Shapes: L layers, B sequences, H KV heads, G query heads each, N slots of a layer, D head dim.
"""

from dataclasses import dataclass

from torch import Tensor

from kvbench.cache.layer_rows import LayerRows
from kvbench.policies.stores.batch import BatchStore
from kvbench.policies.stores.dense import DenseStore
from kvbench.policies.stores.ragged import RaggedStore
from kvbench.policies.stores.store import LayerStore

Unit = DenseStore | RaggedStore
"""Sequences of one layer whose memory is in one piece."""


def units_of(store: LayerStore) -> list[Unit]:
    """What a layer holds, piece of memory by piece; none where it is not dense, or slots have a bias."""
    if store.bias is not None:
        return []
    if isinstance(store, BatchStore):
        return list(store.members)
    return [store] if type(store) in (DenseStore, RaggedStore) else []  # type: ignore[list-item]


@dataclass
class DeviceSlots:
    """Slots of all layers. The last one of a layer is always empty: where shorter heads are filled up, it is read.

    keys, values: [N,D] of each layer. positions: of all layers one after another, -1 = empty; drawn: attention [...,G]
    of the newest queries, alike, where a policy reads it. starts, counts, free [L,B,H]: where a head's slots begin in
    its layer, how many of them attention looks at, and which of them a sequence that evicts leaves empty. before
    [L,1,1]: slots of the layers before. places [B,1]: where the next tokens stand.
    """

    keys: LayerRows
    values: LayerRows
    positions: Tensor
    drawn: Tensor | None
    starts: Tensor
    counts: Tensor
    free: Tensor
    before: Tensor
    places: Tensor
