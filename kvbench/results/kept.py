"""Which tokens of a prompt a cache holds: by how many heads each is held, and the share of its named parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

KeptHeads = list[list[int]]
"""Pairs `[heads, tokens]`: the first `tokens` tokens of the prompt are held by `heads` KV heads of all layers, and so
on to the prompt's last token. They are counted after the last generated token, like `kept_tokens`.
"""


def kept_heads(positions: Iterable[Tensor], prompt_tokens: int) -> KeptHeads:
    """The pairs of one sequence. positions: [H_kv, C] for every layer, the position in each slot, -1 if it is empty."""
    held = np.concatenate([layer.flatten().cpu().numpy() for layer in positions]).astype(np.int64)
    kept = np.bincount(held + 1, minlength=prompt_tokens + 1)[1 : prompt_tokens + 1]
    ends = [*(np.flatnonzero(np.diff(kept)) + 1).tolist(), len(kept)]
    return [[int(kept[end - 1]), end - start] for start, end in pairwise([0, *ends])]


def kept_spans(
    positions: Iterable[Tensor], spans: Mapping[str, Sequence[tuple[int, int]]]
) -> tuple[dict[str, float], dict[str, float]]:
    """The kept share of each part of a prompt, and the share of KV heads (of all layers) that hold all of it.

    positions: [H_kv, C] for every layer, -1 in empty slots.
    """
    named = {name: sorted({at for a, b in parts for at in range(a, b)}) for name, parts in spans.items() if parts}
    end = 1 + max((part[-1] for part in named.values()), default=-1)
    held = []
    for layer in positions:
        at = layer.cpu().numpy()
        found = np.zeros((len(at), end + 1), dtype=bool)  # the last column: positions of no part
        np.put_along_axis(found, np.where((at < 0) | (at > end), end, at), True, axis=1)
        held.append(found)
    heads = np.concatenate(held)
    kept = {name: heads[:, part] for name, part in named.items()}
    return (
        {name: float(x.mean()) for name, x in kept.items()},
        {name: float(x.all(1).mean()) for name, x in kept.items()},
    )


def counts(pairs: Sequence[Sequence[int]]) -> list[int]:
    """The number of heads that keep each token of the prompt."""
    return [heads for heads, tokens in pairs for _ in range(tokens)]
