"""The ragged store: every KV head holds its own number of tokens, and only their bytes.

Tokens lie head after head in flat pages of PAGE slots; a decoding step attends over all pages at once. While a prompt
comes in, and wherever several tokens enter at a time, tokens are held densely; an eviction seals them into pages.
Shapes: B batch, H KV heads, G query heads per KV head, S = B*H segments, N flat slots, C longest segment, D head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.kernels.attention_rows import widen
from kvbench.policies.observation import Arithmetic, State
from kvbench.policies.stores.dense import GROWTH, DenseHeld
from kvbench.policies.stores.store import Held, Store

PAGE = 4  # slots: at most 3 are wasted per head, and a page is still a small matrix product


class Pages:
    """Flat tensors [N,...] cut into S segments, each a whole number of pages; all of it is held memory."""

    def __init__(self, padded: dict[str, Tensor], counts: Tensor, spare: int) -> None:
        """Take the first counts [B,H] slots of every padded tensor [B,H,C,...], with room for `spare` more each."""
        self.shape = counts.shape
        self.counts = counts.flatten()
        self.room = spare  # slots every segment has free at its end, at least
        capacity = -(-(self.counts + spare) // PAGE) * PAGE
        self.ends = capacity.cumsum(0)
        self.most = padded["positions"].shape[2]
        into, taken = self._slots(self.most)
        slots = int(self.ends[-1]) if len(self.ends) else 0
        self.flat: dict[str, Tensor] = {}
        for name, tensor in padded.items():
            flat = tensor.new_full((slots, *tensor.shape[3:]), -1 if name == "positions" else 0)
            flat[into[taken]] = tensor[taken]
            self.flat[name] = flat

    @property
    def nbytes(self) -> int:
        return sum(flat.nbytes for flat in self.flat.values()) + self.counts.nbytes + self.ends.nbytes

    def starts(self) -> Tensor:
        """[B,H] flat slot at which each segment begins."""
        return torch.cat([self.ends.new_zeros(1), self.ends[:-1]]).view(self.shape)

    def _slots(self, most: int) -> tuple[Tensor, Tensor]:
        """Flat slot of each segment's slot 0..most-1, [B,H,most], and which of them are in use."""
        steps = torch.arange(most, device=self.counts.device)
        taken = steps < self.counts.view(self.shape)[..., None]
        return (self.starts()[..., None] + steps).masked_fill(~taken, 0), taken

    def padded(self, name: str) -> Tensor:
        """A copy [B,H,C,...] in which shorter segments end in empty slots (position -1, else 0)."""
        slots, taken = self._slots(self.most)
        view = self.flat[name][slots]
        fill = -1 if name == "positions" else 0
        return view.masked_fill_(~taken.view(*taken.shape, *[1] * (view.dim() - 3)), fill)

    def put(self, name: str, slots: Tensor, values: Tensor | float) -> None:
        """Write [B,H,n,...] at each segment's slots [B,H,n]."""
        self.flat[name][self.starts()[..., None] + slots] = values

    def put_all(self, name: str, padded: Tensor) -> None:
        """Write a padded tensor [B,H,C,...] back."""
        slots, taken = self._slots(self.most)
        self.flat[name][slots[taken]] = padded[taken]

    def extend(self) -> Tensor:
        """Open one more slot at the end of every segment and return it, [B,H,1]; only while there is room."""
        slots = self.counts.view(self.shape)[..., None].clone()
        self.counts += 1
        self.room -= 1
        self.most += 1
        return slots

    def attend(self, queries: Tensor, positions: Tensor, how: Arithmetic) -> Tensor:
        """One query per sequence over all segments at once: [B,H_q,1,D] at positions [B,1] -> [B,H_q,1,D]."""
        (batch, heads), query_heads = self.shape, queries.shape[1]
        group, pages = query_heads // heads, len(self.flat["positions"]) // PAGE
        page_ends = self.ends // PAGE
        lengths = torch.diff(page_ends, prepend=page_ends.new_zeros(1))
        segment = torch.repeat_interleave(lengths, output_size=pages)
        rows = (widen(queries) * how.scaling).view(batch * heads, group, -1)[segment]  # [pages,G,D]
        keys = widen(self.flat["keys"]).view(pages, PAGE, -1)
        logits = torch.bmm(keys, rows.transpose(1, 2))  # [pages,PAGE,G]
        if how.softcap is not None:
            logits = how.softcap * torch.tanh(logits / how.softcap)
        weights = self._softmax(logits.view(-1, group), self._visible(segment, positions, how), segment)
        values = self.flat["values"].view(pages, PAGE, -1)
        parts = torch.bmm(weights.view(pages, PAGE, group).transpose(1, 2), widen(values))  # [pages,G,D]
        out = parts.new_zeros(batch * heads, group, parts.shape[-1]).index_add_(0, segment, parts)
        return out.view(batch, query_heads, 1, -1).to(queries.dtype)

    def _visible(self, segment: Tensor, query_positions: Tensor, how: Arithmetic) -> Tensor:
        """[N] bool: stored tokens, not later than their sequence's query, inside the model's sliding window."""
        positions = self.flat["positions"].view(-1, PAGE)
        query = query_positions[:, 0][segment // self.shape[1]][:, None]
        seen = (positions >= 0) & (positions <= query)
        if how.sliding_window is not None:
            seen &= positions > query - how.sliding_window
        return seen.flatten()

    def _softmax(self, logits: Tensor, seen: Tensor, segment: Tensor) -> Tensor:
        """Softmax of logits [N,G] within each segment, over its visible slots; 0 where nothing is visible."""
        owner = segment.repeat_interleave(PAGE)
        logits = logits.masked_fill(~seen[:, None], -torch.inf)
        index = owner[:, None].expand_as(logits)
        highest = logits.new_full((self.counts.numel(), logits.shape[1]), -torch.inf)
        highest = highest.scatter_reduce_(0, index, logits, "amax").nan_to_num_(neginf=0.0)
        weights = (logits - highest[owner]).exp_()
        total = torch.zeros_like(highest).index_add_(0, owner, weights)
        return weights / total.clamp_(min=torch.finfo(weights.dtype).tiny)[owner]


class RaggedHeld(Held):
    """Dense while tokens come in several at a time, pages from the first eviction on."""

    def __init__(self, dense: DenseHeld) -> None:
        self._dense: DenseHeld | None = dense
        self._statistics = tuple(dense.state)
        self._pages: Pages | None = None
        self._ascending = True
        self._free: Tensor | None = None

    @property
    def keys(self) -> Tensor:
        return self._dense.keys if self._dense else self._padded("keys")

    @property
    def values(self) -> Tensor:
        return self._dense.values if self._dense else self._padded("values")

    @property
    def positions(self) -> Tensor:
        return self._dense.positions if self._dense else self._padded("positions")

    def _padded(self, name: str) -> Tensor:
        assert self._pages is not None
        return self._pages.padded(name)

    @property
    def state(self) -> State:
        return self._dense.state if self._dense else {name: self._padded(name) for name in self._statistics}

    def remember(self, state: State) -> None:
        if self._pages is not None:
            for name, values in state.items():
                self._pages.put_all(name, values)

    @property
    def nbytes(self) -> int:
        if self._dense is not None:
            return self._dense.nbytes
        assert self._pages is not None
        return self._pages.nbytes

    @property
    def packed(self) -> bool:
        return self._dense is not None and self._dense.packed

    @property
    def ascending(self) -> bool:
        return self._dense.ascending if self._dense else self._ascending

    def append(self, keys: Tensor, values: Tensor, positions: Tensor, absent: bool) -> None:
        if self._pages is None or keys.shape[2] > 1 or absent:
            self._open().append(keys, values, positions, absent)
            return
        slots, self._free = self._free, None
        if slots is None:
            if self._pages.room == 0:
                self._seal(self._contents(), self._pages.counts.view(self._pages.shape), GROWTH)
            slots = self._pages.extend()
        else:
            self._ascending = False
        spread = positions[:, None, :].expand(-1, keys.shape[1], -1).to(torch.int32)
        for name, token in {"keys": keys, "values": values, "positions": spread}.items():
            self._pages.put(name, slots, token)
        for name in self._statistics:
            self._pages.put(name, slots, 0.0)

    def _contents(self) -> dict[str, Tensor]:
        return {name: self._padded(name) for name in ("keys", "values", "positions", *self._statistics)}

    def _open(self) -> DenseHeld:
        """The dense form: what is in pages now, padded to the longest segment."""
        if self._dense is None:
            self._dense = DenseHeld.of(self._contents(), self._statistics, self._ascending)
            self._pages = self._free = None
        return self._dense

    def _seal(self, padded: dict[str, Tensor], counts: Tensor, spare: int) -> None:
        self._pages, self._dense, self._free = Pages(padded, counts, spare), None, None

    def keep(self, mask: Tensor, spare: int) -> Tensor:
        dense = self._open()
        slots = dense.keep(mask, 0)
        self._seal(dense.contents(), (dense.positions >= 0).sum(-1), spare)
        self._ascending = True
        return slots

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        if self._dense is not None:
            self._dense.write(slots, keys, values)
            return
        assert self._pages is not None
        self._pages.put("keys", slots, keys.to(self._pages.flat["keys"].dtype))
        self._pages.put("values", slots, values.to(self._pages.flat["values"].dtype))

    def release(self, slots: Tensor, rows: Sequence[bool] | None) -> None:
        if self._dense is not None or rows is not None:
            self._open().release(slots, rows)
            return
        assert self._pages is not None
        self._pages.put("positions", slots, -1)
        self._free = slots

    def attend(self, queries: Tensor, positions: Tensor, how: Arithmetic) -> Tensor | None:
        if self._pages is None or queries.shape[2] > 1:
            return None
        return self._pages.attend(queries, positions, how)


@dataclass(frozen=True)
class Ragged(Store):
    """Keys and values as the model made them; every KV head of every sequence holds only its own tokens."""

    def open(self, keys: Tensor, values: Tensor, statistics: tuple[str, ...], width: int) -> Held:
        return RaggedHeld(DenseHeld(keys, values, statistics, width))
