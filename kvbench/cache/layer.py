"""The contents of one layer for one sequence: slots, statistics and the observation window.

Shapes: H_q query heads, H_kv KV heads, C slots, D head dim.
"""

import torch
from torch import Tensor

from kvbench.cache.footprint import decoded
from kvbench.cache.reading import PageReads
from kvbench.policies.observation import Memory
from kvbench.policies.policy import Policy
from kvbench.policies.ranking import Ranking
from kvbench.policies.stores.slots import copy_each, writable
from kvbench.policies.stores.store import LayerStore


class RecentQueries:
    """The newest `window` rotated queries [B,H_q,w,D] and their positions [B,w], oldest first.

    borrowed: they are views of the queries of a prompt.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self.held: tuple[Tensor, Tensor] | None = None
        self.borrowed = False
        self._own: tuple[Tensor, Tensor] | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self.held is None else self.held[0].nbytes + self.held[1].nbytes

    @property
    def full(self) -> bool:
        """Whether the window has its final length."""
        return self._window == (0 if self.held is None else self.held[0].shape[2])

    def add(self, queries: Tensor, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        """Append queries [B,H_q,m,D] at positions [B,m] and return the window; None for a window of length 0."""
        window, new = self._window, queries.shape[2]
        if window == 0:
            return None
        if self.held is not None and new < window:
            first = max(0, self.held[0].shape[2] + new - window)
            queries = torch.cat([self.held[0][:, :, first:], queries], dim=2)
            positions = torch.cat([self.held[1][:, first:], positions], dim=1)
            self._own = None if new == 1 else self._own  # a decoded token's window is this new one
        self.held, self.borrowed = (queries[:, :, -window:], positions[:, -window:]), True
        return self.held

    def copy(self) -> None:
        """Copy the window, because views keep the queries of a whole prompt in memory."""
        if self.held is not None and self.borrowed:
            copies = self.keep(*self.held)
            if copies:
                copy_each(copies)
            else:
                queries, positions = (x.clone(memory_format=torch.contiguous_format) for x in self.held)
                self.held = self._own = queries, positions

    def keep(self, queries: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Own this copy of the window. A window of the same size stays where it is, so that blocks can be recorded.

        Returns its tensors with their new contents, which the caller copies into them.
        """
        new, own = (queries, positions), self._own
        if own is None or own[0].shape != queries.shape or queries.requires_grad or not writable(own[0]):
            own = self._own = new
        self.held, self.borrowed = own, False
        return [] if own is new else list(zip(own, new, strict=True))

    def bind(self, queries: Tensor, positions: Tensor) -> None:
        """Hold tensors that others change."""
        self.held, self.borrowed, self._own = (queries, positions), False, None

    def reopen(self, window: int) -> None:
        """Change the length of the window before another prompt."""
        self._window = window

    def limit(self, window: int) -> None:
        """Shorten the window, and drop older queries."""
        if self.held is not None:
            self.borrowed |= window < self.held[0].shape[2]
            self.held = None if window == 0 else (self.held[0][:, :, -window:], self.held[1][:, -window:])
            self._own = None if window == 0 else self._own
        self._window = window


class Layer:
    """The contents of one layer: tokens, statistics, and the observation window.

    count: tokens held per KV head. short: tokens by which the mean KV head is shorter. footprint: entries of the mean
    head, summed over the tokens (`kvbench.cache.footprint`). memory: data of scorer and merger. ranking: the scores of
    a prompt until its budget is known. unsettled: the eviction of a complete prompt is still due. pages: for sparse
    attention. compacted: several tokens were evicted at once. decided: tokens of the sequence when the policy
    last decided what to evict.
    """

    def __init__(self, policy: Policy, index: int) -> None:
        self.policy = policy
        self.index = index
        self.count = self.decided = 0
        self.short = self.footprint = 0.0
        self.memory: Memory = {}
        self.ranking: Ranking | None = None
        self.opened = self.unsettled = self.compacted = False
        self.recent = RecentQueries(policy.needs.window)
        self.pages = None if policy.reader is None else PageReads(policy, index)
        self.query_heads = 0
        self.store: LayerStore  # set by `open`

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor held: keys, values, positions, running statistics, observation window."""
        held = self.store.nbytes if self.opened else 0
        ranking = 0 if self.ranking is None else self.ranking.nbytes
        memory = sum(x.nbytes for x in self.memory.values()) if self.memory else 0
        pages = 0 if self.pages is None else self.pages.nbytes
        return held + ranking + memory + pages + self.recent.nbytes

    @property
    def spare_nbytes(self) -> int:
        """Bytes reserved but unused: capacity for new tokens, and the slots of evicted ones."""
        return self.store.sizes().spare if self.opened else 0

    @property
    def positions(self) -> Tensor:
        """LongTensor [1,H_kv,C]: original position of each slot, -1 = empty."""
        return self.store.positions.long() if self.opened else torch.empty(0, 0, 0, dtype=torch.long)

    def took(self, steps: int, slots: int, grow: int) -> None:
        """Note decoding steps, of which the first took new slots; grow: those that it takes until it evicts."""
        self.footprint += decoded(self.count - self.short, steps, max(0, grow - 1))
        self.count += slots - (slots == grow > 0)

    def open(self, queries: Tensor, keys: Tensor, values: Tensor) -> None:
        """Open the store of a layer without tokens, for tensors like these. ValueError for a wrong shape."""
        self.policy.store.check_shape(keys.shape[1], values.shape[-1])
        self.query_heads, self.opened = queries.shape[1], True
        width = self.query_heads // keys.shape[1] if self.policy.needs.query_heads else 1
        store = self.policy.store.for_layer(self.index)
        self.store = store.open(keys, values, self.policy.needs.statistics, width)
