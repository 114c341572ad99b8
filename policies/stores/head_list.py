"""Stores of single KV heads as one store, for heads that hold different numbers of tokens.

Shapes: H KV heads, C slots of the longest head, D head dim.
"""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.policies.observation import AttentionParams
from kvbench.policies.stores.slots import padded
from kvbench.policies.stores.store import CompressedStore, Sizes


class HeadList:
    """One store per KV head. The views are copies, in which shorter heads end in empty slots."""

    def __init__(self, heads: Sequence[CompressedStore]) -> None:
        self.heads = list(heads)

    @property
    def keys(self) -> Tensor:
        return padded([held.keys for held in self.heads]).transpose(0, 1)

    @property
    def values(self) -> Tensor:
        return padded([held.values for held in self.heads]).transpose(0, 1)

    @property
    def positions(self) -> Tensor:
        return padded([held.positions for held in self.heads], fill=-1).transpose(0, 1)

    def sizes(self) -> Sizes:
        sizes, kinds = [held.sizes() for held in self.heads], Counter[str]()
        for one in sizes:
            kinds.update(one.kinds)
        return Sizes(dict(kinds), sum(one.spare for one in sizes))

    def expect(self, tokens: int) -> None:
        for held in self.heads:
            held.expect(tokens)

    def append(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        for held, x, y in zip(self.heads, keys.split(1, dim=1), values.split(1, dim=1), strict=True):
            held.append(x, y, positions)

    def settle(self) -> None:
        for held in self.heads:
            held.settle()

    def attend(self, queries: Tensor, positions: Tensor, how: AttentionParams) -> Tensor | None:
        count, own = len(self.heads), [how] * len(self.heads)
        if how.sinks is not None:
            own = [how._replace(sinks=sinks) for sinks in how.sinks.chunk(count, dim=1)]
        groups = zip(self.heads, queries.chunk(count, dim=1), own, strict=True)
        outputs = [held.attend(rows, positions, params) for held, rows, params in groups]
        found = [output for output in outputs if output is not None]
        return torch.cat(found, dim=1) if len(found) == count else None
