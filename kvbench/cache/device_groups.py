"""Layers of codes in groups in a table whose steps kernels compute: what the device has about their exact tokens.

A row has the rings of its layers, whose places steps overwrite, and the numbers that say which tokens are read from
codes. Between two steps, a layer codes what is due in place, and these numbers follow.

Shapes: L layers, P rows of a step, H_q query heads, H KV heads, D head dim.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.cache.layer import Layer
from kvbench.kernels.group_codes import Ring
from kvbench.policies.stores.group_step import CODED, RING
from kvbench.policies.stores.ring_layout import RingLayer

STATE = CODED, *RING
"""What the device has about the row of a sequence with such layers, by name."""


def rings_of(layers: Sequence[Layer]) -> list[RingLayer]:
    """The stores of a sequence's layers, if they have rings."""
    return [layer.store for layer in layers if isinstance(layer.store, RingLayer)]


def ring_state(layers: Sequence[Layer]) -> dict[str, Tensor]:
    """`STATE` of a sequence, [L,...] by name, with as many places in each layer; nothing for other stores."""
    states = []
    for store in rings_of(layers):
        store.level()
        states.append(store.row_state())
    found, most = {}, max((state[RING[2]].shape[2] for state in states), default=0)
    for name in STATE if states else ():
        parts, fill = [state[name] for state in states], -1 if name == RING[2] else 0
        if name != CODED:
            parts = [F.pad(x, (*[0] * 2 * (x.dim() - 3), 0, most - x.shape[2]), value=fill) for x in parts]
        found[name] = torch.cat(parts)
    return found


def bind(layers: Sequence[Layer], state: Mapping[str, Tensor]) -> None:
    """Give the layers of a sequence views of the rings of its row, [L,...] by name."""
    for index, store in enumerate(rings_of(layers) if CODED in state else ()):
        places = store.codec.most_exact
        store.exact = [state[name][index, None, :, :places] for name in RING[:2]]


def unbind(layers: Sequence[Layer]) -> None:
    """Give the layers of a sequence rings of their own."""
    for store in rings_of(layers):
        if store.levelled:
            store.exact = [x.clone(memory_format=torch.contiguous_format) for x in store.exact]
            store.levelled = False


def note_codes(store: RingLayer, state: Mapping[str, Tensor], index: int, positions: Tensor) -> None:
    """Bring the row of a layer that coded tokens up to date, and the positions of its slots."""
    own, places = store.row_state(), store.codec.most_exact
    state[CODED][index] = own[CODED][0]
    state[RING[2]][index, :, : own[RING[2]].shape[2]] = own[RING[2]][0]
    for name in RING[:2]:
        state[name][index, :, places : own[name].shape[2]] = own[name][0, :, places:]
    positions.copy_(store.slot_positions().flatten())


def ring_of(state: Mapping[str, Tensor], index: int) -> Ring:
    """The exact tokens of all rows in one layer."""
    return Ring(*(state[name][index] for name in RING))
