"""The contents of one layer for the sequences of one policy: slots, statistics and the observation window.

Shapes: B batch, H_q query heads, H_kv KV heads, C slots, D head dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.cache.attention import QKV
from kvbench.cache.footprint import fed
from kvbench.cache.reading import PageReads
from kvbench.policies.observation import Memory
from kvbench.policies.policy import Policy
from kvbench.policies.ranking import Ranking
from kvbench.policies.stores.store import LayerStore


class RecentQueries:
    """The newest `window` rotated queries [B,H_q,w,D] and their positions [B,w] (-1 = none), oldest first.

    real: none of them is padding.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self.held: tuple[Tensor, Tensor] | None = None
        self.real = True

    @property
    def nbytes(self) -> int:
        return 0 if self.held is None else self.held[0].nbytes + self.held[1].nbytes

    @property
    def full(self) -> bool:
        """Whether the window has its final length."""
        return self._window == (0 if self.held is None else self.held[0].shape[2])

    def add(self, queries: Tensor, positions: Tensor, aligned: bool) -> tuple[Tensor, Tensor] | None:
        """Append queries [B,H_q,m,D] at positions [B,m] and return the window; None for a window of length 0.

        aligned: all sequences are at the same positions without padding.
        """
        window, new = self._window, queries.shape[2]
        if window == 0:
            return None
        self.real = aligned and (self.real or new >= window)
        if self.held is not None and not (aligned and new >= window):
            first = max(0, self.held[0].shape[2] + new - window) if aligned else 0
            queries = torch.cat([self.held[0][:, :, first:], queries], dim=2)
            positions = torch.cat([self.held[1][:, first:], positions], dim=1)
        if not aligned:
            order = positions.argsort(dim=-1, stable=True)[:, -window:]
            queries = queries.gather(2, order[:, None, :, None].expand(-1, queries.shape[1], -1, queries.shape[3]))
            positions = positions.gather(1, order)
        self.held = queries[:, :, -window:], positions[:, -window:]
        return self.held

    def copy(self) -> None:
        """Copy the window, because views keep the queries of a whole prompt in memory."""
        if self.held is not None:
            queries, positions = (x.clone(memory_format=torch.contiguous_format) for x in self.held)
            self.held = queries, positions

    def reopen(self, window: int) -> None:
        """Change the length of the window before another prompt."""
        self._window = window

    def limit(self, window: int) -> None:
        """Shorten the window, and drop older queries."""
        if self.held is not None:
            self.held = None if window == 0 else (self.held[0][:, :, -window:], self.held[1][:, -window:])
        self._window = window


class LayerState:
    """The contents of one layer: tokens, statistics, and the observation window.

    counts: tokens held per KV head, for each sequence; empty before the first token. footprint: entries held, summed
    over the tokens of each sequence (`kvbench.cache.footprint`). memory: data of scorer and merger
    per sequence. ranking: the scores of a prompt until its budget is known. unsettled: the eviction of a complete
    prompt is still due. pages: for sparse attention. compacted: several tokens were evicted at once.
    """

    def __init__(self, policy: Policy, index: int) -> None:
        self.policy = policy
        self.index = index
        self.counts: list[int] = []
        self.footprint: list[int] = []
        self.memory: Memory = {}
        self.ranking: Ranking | None = None
        self.unsettled = False
        self.compacted = False
        self.recent = RecentQueries(policy.needs.window)
        self.pages = None if policy.reader is None else PageReads(policy, index)
        self.query_heads = 0
        self.store: LayerStore  # set by `open`

    @property
    def opened(self) -> bool:
        """Whether a token was appended."""
        return bool(self.counts)

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor held: keys, values, positions, running statistics, observation window."""
        held = self.store.nbytes if self.counts else 0
        ranking = 0 if self.ranking is None else self.ranking.nbytes
        memory = sum(x.nbytes for x in self.memory.values()) if self.memory else 0
        pages = 0 if self.pages is None else self.pages.nbytes
        return held + ranking + memory + pages + self.recent.nbytes

    @property
    def spare_nbytes(self) -> int:
        """Bytes reserved but unused: capacity for new tokens, and the slots of evicted ones."""
        return self.store.sizes().spare if self.counts else 0

    @property
    def positions(self) -> Tensor:
        """LongTensor [B,H_kv,C]: original position of each slot, -1 = empty."""
        return self.store.positions.long() if self.counts else torch.empty(0, 0, 0, dtype=torch.long)

    def count_entries(self, tokens: Sequence[int]) -> None:
        """Add the entries that `tokens` new tokens of each sequence find, themselves included, to the footprint."""
        each = zip(self.footprint, self.counts, tokens, strict=True)
        self.footprint = [total + fed(held, new) for total, held, new in each]

    def open(self, new: QKV) -> None:
        """Open the store of a layer without tokens, for tensors like these. ValueError for a wrong shape."""
        self.policy.store.check_shape(new.keys.shape[1], new.values.shape[-1])
        self.query_heads = new.queries.shape[1]
        self.counts, self.footprint = [0] * new.keys.shape[0], [0] * new.keys.shape[0]
        width = self.query_heads // new.keys.shape[1] if self.policy.needs.query_heads else 1
        store = self.policy.store.for_layer(self.index)
        self.store = store.open(new.keys, new.values, self.policy.needs.statistics, width)
