"""The newest queries of a layer, kept across steps for scorers that look through an observation window."""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor


class RecentQueries:
    """Up to `window` newest rotated queries [B,H_q,w,D] and their positions [B,w] (-1 = none), oldest first."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._queries: Tensor | None = None
        self._positions: Tensor | None = None
        self.real = True  # none of them is padding

    @property
    def nbytes(self) -> int:
        if self._queries is None or self._positions is None:
            return 0
        return self._queries.nbytes + self._positions.nbytes

    def add(self, queries: Tensor, positions: Tensor, aligned: bool) -> tuple[Tensor, Tensor] | None:
        """Take in queries [B,H_q,m,D] at positions [B,m] and return the newest; None where no window is needed.

        aligned: all sequences add the same positions and none is padding.
        """
        window, new = self._window, queries.shape[2]
        if window == 0:
            return None
        self.real = aligned and (self.real or new >= window)
        if self._queries is not None and self._positions is not None and not (aligned and new >= window):
            first = max(0, self._queries.shape[2] + new - window) if aligned else 0  # older ones make room
            queries = torch.cat([self._queries[:, :, first:], queries], dim=2)
            positions = torch.cat([self._positions[:, first:], positions], dim=1)
        if not aligned:
            order = positions.argsort(dim=-1, stable=True)[:, -window:]
            queries = queries.gather(2, order[:, None, :, None].expand(-1, queries.shape[1], -1, queries.shape[3]))
            positions = positions.gather(1, order)
        self._queries, self._positions = queries[:, :, -window:], positions[:, -window:]
        return self._queries, self._positions

    def keep_copy(self) -> None:
        """Own them: views keep a whole prompt's queries alive, and the positions of a step are all layers'."""
        if self._queries is not None and self._positions is not None:
            own = (x.clone(memory_format=torch.contiguous_format) for x in (self._queries, self._positions))
            self._queries, self._positions = own

    @property
    def held(self) -> tuple[Tensor, Tensor] | None:
        """Queries and positions, if there are any."""
        return None if self._queries is None or self._positions is None else (self._queries, self._positions)

    @property
    def full(self) -> bool:
        """Whether a new query takes the place of an old one: as many are held as ever will be."""
        return self._window == (0 if self._queries is None else self._queries.shape[2])

    def hold(self, queries: Tensor, positions: Tensor) -> None:
        """Hold these instead."""
        self._queries, self._positions = queries, positions

    @property
    def shape(self) -> Hashable:
        """What buffers have in common whose sequences may stand in one batch."""
        return self._window, self.real, None if self._queries is None else self._queries.shape[2]

    @staticmethod
    def of_rows(rows: Sequence[tuple["RecentQueries", int]]) -> "RecentQueries":
        """Sequences out of buffers of one shape, in memory of their own."""
        first = rows[0][0]
        found = RecentQueries(first._window)
        found.real = first.real
        if first._queries is not None:
            found._queries = torch.stack([part._queries[row] for part, row in rows if part._queries is not None])
            found._positions = torch.stack([part._positions[row] for part, row in rows if part._positions is not None])
        return found

    def reopen(self, window: int) -> None:
        """From now on the newest `window` queries are needed again: those still held and those to come."""
        self._window = window

    def limit(self, window: int) -> None:
        """From now on only the newest `window` queries are needed, and no more are held."""
        if window == 0:
            self._queries = self._positions = None
        elif self._queries is not None and self._positions is not None:
            self._queries, self._positions = self._queries[:, :, -window:], self._positions[:, -window:]
        self._window = window
