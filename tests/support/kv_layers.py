"""The slow oracle for models whose layers differ: some read what an earlier one stored."""

from collections.abc import Mapping
from copy import deepcopy

import numpy as np
from kv_oracle import Array, Glance, Head, Rules, SlowSequence


class SlowLayers(SlowSequence):
    """owners: for a layer that stores nothing, the layer it reads.

    It is not under the rules, and no budget counts it.
    """

    def __init__(
        self, rules: Rules, layers: int, kv_heads: int, group: int, prompt: int, owners: Mapping[int, int]
    ) -> None:
        super().__init__(rules, layers, kv_heads, group, prompt)
        self.owners = owners
        self.before: dict[int, list[Head]] = {}  # what an owner held when its queries looked

    def attend(self, layer: int, queries: Array, keys: Array, values: Array, glance: Glance) -> Array:
        if layer in self.owners:
            return self._look(self.before[self.owners[layer]], queries, glance)
        return super().attend(layer, queries, keys, values, glance)

    def _evict(self, layer: int, glance: Glance) -> None:
        self.before[layer] = deepcopy(self.heads[layer])
        super()._evict(layer, glance)
        if self.rules.order == "evict_then_attend":
            self.before[layer] = deepcopy(self.heads[layer])

    def _look(self, heads: list[Head], queries: Array, glance: Glance, first: int | None = None) -> Array:
        """Attention of queries [H_q,n,D] at the last n positions, or from `first` on."""
        first = self.seen_after - queries.shape[1] if first is None else first
        out = np.zeros((*queries.shape[:2], len(next(iter(heads[0].values.values())))))
        for q, rows in enumerate(queries):
            head = heads[q // self.group]
            for i, query in enumerate(rows):
                for p, weight in glance.weights(query, first + i, head.keys).items():
                    out[q, i] += weight * head.values[p]
        return out
