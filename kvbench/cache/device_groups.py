"""Layers of codes in groups in a table: their form there, and what the device has about their exact tokens.

Shapes: L layers, P rows of a step, H_q query heads, H KV heads, D head dim.
"""

from collections.abc import Mapping
from collections.abc import Sequence as List

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.cache.layer import Layer
from kvbench.cache.sequence import Sequence
from kvbench.kernels.group_codes import Ring
from kvbench.policies.stores.column_layer import ColumnLayer
from kvbench.policies.stores.group_slots import EXACT, GroupSlots, count_bytes

STATE = "coded", *EXACT
"""What the device has about the row of a sequence with such layers, by name."""


def to_slots(layer: Layer) -> bool:
    """Give a layer of codes in groups the form of a recorded step; whether it is one."""
    if isinstance(layer.store, ColumnLayer):
        layer.store = GroupSlots(layer.store)
    return isinstance(layer.store, GroupSlots)


def from_slots(sequence: Sequence, layer: Layer) -> bool:
    """Give such a layer the store that it would have without the batch; whether it was one."""
    if not isinstance(layer.store, GroupSlots):
        return False
    layer.store = store = layer.store.columns()
    try:
        store.settle()
    except ValueError as error:  # numbers that are not finite
        sequence.fail(error)
    return True


def exact_state(layers: List[Layer]) -> dict[str, Tensor]:
    """`STATE` of a sequence, [L,...] by name, with as many places in each layer; nothing for other stores."""
    stores = [layer.store for layer in layers if isinstance(layer.store, GroupSlots)]
    if not stores:
        return {}
    found, most = {"coded": torch.cat([store.coded for store in stores])}, max(map(_places, stores))
    for name in EXACT:
        fill, parts = -1 if name == EXACT[2] else 0, []
        for store in stores:
            x = store.exact[name]
            parts.append(F.pad(x, (*[0] * 2 * (x.dim() - 3), 0, most - x.shape[2]), value=fill))
        found[name] = torch.cat(parts)
    return found


def follow(sequence: Sequence, layers: List[Layer], steps: int, state: Mapping[str, Tensor]) -> None:
    """Bring the layers of a sequence up to date after some steps: their bytes, and `STATE` of its row, [L,...]."""
    stores = [layer.store for layer in layers if isinstance(layer.store, GroupSlots)]
    for index in count_bytes(stores, steps):
        sequence.note_bytes(index)
    for index, store in enumerate(stores):
        store.exact = {name: state[name][index, None, :, : _places(store)] for name in EXACT}


def ring_of(state: Mapping[str, Tensor], index: int) -> Ring:
    """The exact tokens of all rows in one layer."""
    return Ring(*(state[name][index] for name in EXACT))


def _places(store: GroupSlots) -> int:
    return store.exact[EXACT[2]].shape[2]
