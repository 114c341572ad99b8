"""The slow oracle for models whose layers differ: some read what an earlier one stored, some see one chunk."""

from collections.abc import Mapping
from copy import deepcopy

import numpy as np
from kv_oracle import Array, Glance, Head, Rows, Rules, SlowSequence


class SlowLayers(SlowSequence):
    """owners: for a layer that stores nothing, the layer it reads. chunks: tokens of a chunk, for layers that have one.

    Neither is under the rules, and no budget counts them.
    """

    def __init__(
        self,
        rules: Rules,
        layers: int,
        kv_heads: int,
        group: int,
        prompt: int,
        owners: Mapping[int, int],
        chunks: Mapping[int, int],
    ) -> None:
        super().__init__(rules, layers, kv_heads, group, prompt)
        self.owners, self.chunks = owners, chunks
        self.before: dict[int, list[Head]] = {}  # what an owner held when its queries looked

    def attend(self, layer: int, queries: Array, keys: Array, values: Array, glance: Glance) -> Array:
        if layer in self.owners:
            return self._look(self.before[self.owners[layer]], queries, glance)
        if layer in self.chunks:
            return self._attend_in_chunk(layer, queries, keys, values, glance)
        return super().attend(layer, queries, keys, values, glance)

    def _evict(self, layer: int, glance: Glance) -> None:
        self.before[layer] = deepcopy(self.heads[layer])
        super()._evict(layer, glance)
        if self.rules.order == "evict_then_attend":
            self.before[layer] = deepcopy(self.heads[layer])

    def _attend_in_chunk(self, layer: int, queries: Array, keys: Array, values: Array, glance: Glance) -> Array:
        """One new token after the other: at a chunk's first all others go."""
        out = []
        for i, position in enumerate(range(self.seen, self.seen_after)):
            for kv, head in enumerate(self.heads[layer]):
                if position % self.chunks[layer] == 0:
                    head.keys.clear()
                    head.values.clear()
                head.keys[position], head.values[position] = keys[kv, i], values[kv, i]
            out.append(self._look(self.heads[layer], queries[:, i : i + 1], glance, first=position))
        return np.concatenate(out, axis=1)

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


class SlowReaders(SlowLayers):
    """An owner's tokens are scored at the end of a call, by its own query heads and those of all its readers alike."""

    def __init__(
        self,
        rules: Rules,
        layers: int,
        kv_heads: int,
        group: int,
        prompt: int,
        owners: Mapping[int, int],
        chunks: Mapping[int, int],
    ) -> None:
        super().__init__(rules, layers, kv_heads, group, prompt, owners, chunks)
        self.asked: dict[int, list[Array]] = {owner: [] for owner in owners.values()}
        self.glances: dict[int, Glance] = {}
        for layer in self.asked:
            count = self.group * (1 + list(owners.values()).count(layer))
            for head in self.heads[layer]:
                head.sums = [{} for _ in range(count)]

    def attend(self, layer: int, queries: Array, keys: Array, values: Array, glance: Glance) -> Array:
        owner = self.owners.get(layer, layer)
        if owner in self.asked:
            self.asked[owner].append(queries)
            self.glances[owner] = glance
        return super().attend(layer, queries, keys, values, glance)

    def _accumulate(self, layer: int, rows: Rows) -> None:
        if layer not in self.asked:
            super()._accumulate(layer, rows)

    def _evict(self, layer: int, glance: Glance) -> None:
        if layer not in self.asked:
            super()._evict(layer, glance)
        else:
            self.before[layer] = deepcopy(self.heads[layer])

    def end(self) -> None:
        own = self.group
        for layer, several in self.asked.items():
            by_head = [queries.reshape(len(self.heads[layer]), own, *queries.shape[1:]) for queries in several]
            together = np.concatenate([np.concatenate(parts) for parts in zip(*by_head, strict=True)])
            new = range(self.seen, self.seen_after)
            self.queries[layer] |= {p: together[:, i] for i, p in enumerate(new)}
            self.group = own * len(several)
            SlowSequence._accumulate(self, layer, self._rows(layer, self.glances[layer]))
            SlowSequence._evict(self, layer, self.glances[layer])
            self.group = own
            several.clear()
        super().end()
