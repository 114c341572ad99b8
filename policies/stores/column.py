"""The keys, or the values, of one layer: runs of codes, then a tail in full precision.

Shapes: B batch, H KV heads, r query rows per KV head, C tokens of the longest head, D head dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.kernels.references import widen
from kvbench.policies.stores.codes import Codes, Run
from kvbench.policies.stores.queue import Counts, Queue
from kvbench.policies.stores.slots import take

TAIL_GROWTH = 16  # slots; a tail is at most a few hundred tokens long, so moving it this often costs nothing


class Column:
    """Tokens, oldest first: codes, then the exact tail. KV heads may hold different numbers of either."""

    def __init__(self, *runs: Run) -> None:
        self.runs = list(runs)
        self.tail = Queue(TAIL_GROWTH)

    @property
    def coded(self) -> int:
        """Tokens held as codes, at most."""
        return sum(run.tokens for run in self.runs)

    @property
    def even(self) -> bool:
        """Whether all KV heads hold equally many tokens, equally many of them as codes."""
        return self.tail.counts is None and all(run.even for run in self.runs)

    @property
    def tokens(self) -> int:
        """Tokens of the longest KV head."""
        return self.coded + self.tail.most if self.even else int(self.lengths().max())

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor held."""
        return self.tail.nbytes() + sum(run.nbytes for run in self.runs)

    def lengths(self) -> Tensor:
        """[B,H] tokens of each KV head."""
        return self.coded_lengths() + self.tail.lengths()

    def coded_lengths(self) -> Tensor:
        """[B,H] tokens of each KV head that are held as codes."""
        zero = torch.zeros_like(self.tail.lengths())
        return sum((run.lengths() for run in self.runs if run.tokens), zero)

    def append(self, x: Tensor, counts: Tensor | None) -> None:
        """Append x [B,H,n,D] to the tail; counts [B,H]: only the first so many of each head."""
        self.tail.append({"x": x}, counts)

    def oldest(self, counts: Counts) -> Tensor:
        """The tail's first tokens, n the largest of `counts`: [B,H,n,D]."""
        return self.tail.oldest("x", most(counts))

    def quantise(self, counts: Counts, x: Tensor | None = None, run: int = -1) -> None:
        """Quantise the tail's first tokens: `x` [B,H,n,D] in their place where it is given, else as they are."""
        if most(counts) == 0:
            return
        own, codes = self.oldest(counts), self.runs[run]
        assert isinstance(codes, Codes)
        codes.append(own if x is None else x, own.dtype, counts if isinstance(counts, Tensor) else None)
        self.tail.drop(counts)

    def replace_runs(self, runs: Sequence[Run], counts: Counts) -> None:
        """Hold these runs instead, which include the tail's first `counts` tokens."""
        self.runs = list(runs)
        self.tail.drop(counts)

    def view(self) -> Tensor:
        """[B,H,C,D] in the model's dtype, dequantised where it was quantised."""
        tail = self.tail.view("x")
        runs = [run.dequantised().to(tail.dtype) for run in self.runs if run.tokens]
        x = torch.cat([*runs, tail], dim=2) if runs else tail
        return x if self.even else take(x, self._order())

    def logits(self, queries: Tensor, ordered: bool = True) -> Tensor:
        """queries [B,H,r,D] float32 times keys: [B,H,r,C]; unless `ordered`, in the order of the runs."""
        parts = [run.logits(queries) for run in self.runs if run.tokens]
        if self.tail.most:
            parts.append(queries @ widen(self.tail.view("x")).transpose(-1, -2))
        rows = torch.cat(parts, dim=-1)
        order = self._places(ordered)
        return rows if order is None else rows.gather(-1, order[:, :, None].expand(-1, -1, rows.shape[2], -1))

    def mix(self, weights: Tensor, ordered: bool = True) -> Tensor:
        """weights [B,H,r,C] float32 times values: [B,H,r,D]; unless `ordered`, in the order of the runs."""
        order = self._places(ordered)
        if order is not None:
            spread = weights.new_zeros(*weights.shape[:-1], self.coded + self.tail.most)
            order = order[:, :, None].expand_as(weights)
            weights = spread.scatter_add_(-1, order, weights)  # beyond a head's own tokens weights are 0
        out, first = None, 0
        for run in self.runs:
            if run.tokens:
                part = run.mix(weights[..., first : first + run.tokens])
                out, first = part if out is None else out + part, first + run.tokens
        if self.tail.most:
            part = weights[..., first:] @ widen(self.tail.view("x"))
            out = part if out is None else out + part
        assert out is not None, "a layer without tokens"
        return out

    def _order(self) -> Tensor:
        """[B,H,C] place of each head's i-th token among codes and tail; beyond its last token any valid place."""
        steps = torch.arange(self.tokens, device=self.tail.lengths().device)
        coded = self.coded_lengths()[..., None]
        places = torch.where(steps < coded, steps, steps + self.coded - coded)
        return places.clamp(max=self.coded + self.tail.most - 1)

    def _places(self, ordered: bool) -> Tensor | None:
        """[B,H,C] place of each head's i-th token among what runs and tail return; None: i."""
        if not self.even:
            return self._order()
        own = self.runs[0].places() if ordered and self.coded else None
        if own is None:
            return None
        assert len(self.runs) == 1, "a run with an order of its own is the only one"
        rest = torch.arange(self.coded, self.tokens, device=own.device).expand(*own.shape[:2], -1)
        return torch.cat([own, rest], dim=-1)


def most(counts: Counts) -> int:
    """The largest of counts."""
    return counts if isinstance(counts, int) else int(counts.max())


def beyond(tokens: Counts, residual: int) -> Counts:
    """As many as exceed `residual`."""
    more = tokens - residual
    return more.clamp(min=0) if isinstance(more, Tensor) else max(more, 0)
