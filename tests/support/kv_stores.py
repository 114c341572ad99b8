"""Feeding a store as a cache does, without a model, and the plain attention its own is compared with."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvbench.policies.observation import AttentionParams, Observation
from kvbench.policies.stores.store import Store


def stream(
    tokens: int, heads: int = 2, dim: int = 16, *, batch: int = 1, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Random keys and values [B,H,T,D]."""
    torch.manual_seed(seed)
    shape = (batch, heads, tokens, dim)
    return torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)


def feed(
    store: Store,
    keys: Tensor,
    values: Tensor,
    splits: Sequence[int] | None = None,
    *,
    queries: Tensor | None = None,
    prompt: int | None = None,
) -> Any:
    """What `store` holds after tokens [B,H,T,D] came in calls of the given sizes; all of them are in view of `queries`.

    It settles after every call, from the one that ends the prompt on (None: from the first call on).
    """
    held = store.open(keys, values, (), 1)
    seen = 0
    for size in splits or [keys.shape[2]]:
        here = slice(seen, seen + size)
        positions = torch.arange(seen, seen + size).expand(keys.shape[0], -1)
        held.append(keys[:, :, here], values[:, :, here], positions)
        seen += size
        if held.watching and queries is not None:
            held.observe(observation(held, queries[:, :, here], positions), prompt or splits_first(splits, keys))
        if queries is not None:
            held.attend(queries[:, :, here], positions, AttentionParams(keys.shape[-1] ** -0.5))
        if seen >= (prompt or 0):
            held.settle()
    return held


def splits_first(splits: Sequence[int] | None, keys: Tensor) -> int:
    return splits[0] if splits else keys.shape[2]


def observation(held: Any, queries: Tensor, positions: Tensor) -> Observation:
    return Observation(
        layer=0,
        queries=queries,
        query_positions=positions,
        keys=held.keys,
        values=held.values,
        positions=held.positions,
        seen=positions[:, -1] + 1,
        phase="prompt",
        params=AttentionParams(queries.shape[-1] ** -0.5),
    )


def plain_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Softmax attention of queries [B,H_q,1,D] over everything, in float64."""
    group = queries.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (keys, values))
    return (queries.double() @ keys.mT * queries.shape[-1] ** -0.5).softmax(-1) @ values


def attended(held: Any, queries: Tensor, position: int) -> Tensor:
    """The store's own attention for one query per sequence; it must have one."""
    positions = torch.full((queries.shape[0], 1), position)
    out = held.attend(queries, positions, AttentionParams(queries.shape[-1] ** -0.5))
    assert out is not None, "nothing is in codes"
    return out
