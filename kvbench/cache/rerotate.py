"""Rotate kept keys to consecutive positions, up to that of the newest token.

Attention depends only on the distance between a key and a query. Kept keys at T - b, ..., T - 1 with later tokens at T,
T + 1, ... therefore give the same attention as keys at 0, ..., b - 1 with later tokens at b, b + 1, ..., and the model
continues to count positions as before.

Shapes: B batch, H_kv KV heads, n kept slots of the head with the most.
"""

import torch
from torch import Tensor

from kvbench.kernels.selection import take
from kvbench.policies.mergers.merger import in_order
from kvbench.policies.observation import MOVED, Observation
from kvbench.policies.stores.store import LayerStore


def close_gaps(held: LayerStore, kept: Tensor, seen: Observation) -> None:
    """Rotate the keys of the kept slots, bool [B,H_kv,T], to consecutive positions in each head.

    The statistic `MOVED` records by how many positions a token was moved. Raises ValueError for a layer with a sliding
    window.
    """
    if seen.params.sliding_window is not None:
        raise ValueError(
            "rerotate=true moves keys, but the model's sliding window hides tokens by their original position: use "
            "rerotate=false, or a model without a sliding window"
        )
    slots, present = in_order(kept, held.positions)
    rank = torch.arange(slots.shape[-1], device=slots.device).where(present, 0)
    slots = torch.where(present, slots, slots[..., :1])  # padding of shorter heads repeats their first token
    positions, state = held.positions.gather(-1, slots).long(), held.state
    before = positions + state[MOVED][..., 0].gather(-1, slots).long()
    after = seen.seen[:, None, None] - present.sum(-1, keepdim=True) + rank
    keys = take(held.keys, slots)
    turned = seen.model.rotation(after.clamp(min=0)).apply(
        seen.model.rotation(before.clamp(min=0)).inverse().apply(keys)
    )
    held.write(slots, torch.where((after != before)[..., None], turned.to(keys.dtype), keys), take(held.values, slots))
    state = held.state
    moved = (after - positions).to(state[MOVED].dtype)[..., None].expand(-1, -1, -1, state[MOVED].shape[-1])
    state[MOVED].scatter_(2, slots[..., None].expand_as(moved), moved)
    held.state = state
