"""The newest queries of a layer, kept across steps for scorers that look through an observation window."""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from kvbench.policies.contents import saved


@saved
class RecentQueries:
    """Up to `window` newest rotated queries [B,H_q,w,D] and their positions [B,w] (-1 = none), in any order."""

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

    def add(
        self, queries: Tensor, positions: Tensor, aligned: bool, found: dict[Hashable, Tensor] | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """Take in queries [B,H_q,m,D] at positions [B,m] and return the newest; None where no window is needed.

        aligned: all sequences add the same positions and none is padding. found: what other layers, which hold the
        queries of the same positions in the same order, found out in this step.
        """
        window = self._window
        if window == 0:
            return None
        self.real = aligned and (self.real or queries.shape[2] >= window)
        if aligned and queries.shape[2] >= window:
            self._queries, self._positions = queries[:, :, -window:], positions[:, -window:]
        elif self._queries is None or self._positions is None:
            self._queries, self._positions = queries, positions
            self._cut(aligned)
        elif aligned and queries.shape[2] == 1 and self._queries.shape[2] == window:
            found = {} if found is None else found
            if "oldest" not in found:
                found["oldest"] = self._positions.argmin(-1, keepdim=True)
            oldest = found["oldest"]
            if queries.shape not in found:
                found[queries.shape] = oldest[:, None, :, None].expand_as(queries)
            self._queries.scatter_(2, found[queries.shape], queries)
            self._positions.scatter_(1, oldest, positions)
        else:
            self._queries = torch.cat([self._queries, queries], dim=2)
            self._positions = torch.cat([self._positions, positions], dim=1)
            self._cut(aligned=False)
        return self._queries, self._positions

    def _cut(self, aligned: bool) -> None:
        """Keep the newest `window`, ordered by position."""
        assert self._queries is not None
        assert self._positions is not None
        if not aligned or self._queries.shape[2] > self._window:
            count = min(self._window, self._queries.shape[2])
            newest = self._positions.topk(count, dim=-1).indices
            newest = newest.gather(-1, self._positions.gather(-1, newest).argsort(-1))
            index = newest[:, None, :, None].expand(-1, self._queries.shape[1], -1, self._queries.shape[3])
            self._queries, self._positions = self._queries.gather(2, index), self._positions.gather(1, newest)

    def keep_copy(self) -> None:
        """Own them: views would keep a whole prompt's queries alive, and whole tensors may be other layers' too.

        Decoding writes in place, and the positions of a step are one tensor for all layers.
        """
        if self._queries is not None and self._positions is not None:
            own = (x.clone(memory_format=torch.contiguous_format) for x in (self._queries, self._positions))
            self._queries, self._positions = own

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
        elif window < self._window and self._queries is not None:
            self._window = window
            self._cut(aligned=False)
        self._window = window
