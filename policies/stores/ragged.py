"""The ragged store: every KV head holds its own number of tokens, and only their bytes.

Tokens lie head after head in flat segments; a decoding step attends over all segments of a sequence at once. While a
prompt comes in, and wherever several tokens enter at a time, tokens are held densely; an eviction seals them.
Shapes: B batch, H KV heads, S = B*H segments, N flat slots, n of one sequence, C longest segment, D head dim.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.kernels.decode import decode_attention_flat, decodes
from kvbench.kernels.prompt import one_for_all
from kvbench.kernels.references import beside_sinks, widen
from kvbench.policies.observation import AttentionParams, State
from kvbench.policies.stores.dense import DenseStore
from kvbench.policies.stores.slots import block_of, by_kind
from kvbench.policies.stores.store import LayerStore, Store
from kvbench.policies.stores.store import Segments as Places


class Segments:
    """Flat tensors [N,...] cut into S segments, one per KV head of every sequence; all of it is held memory."""

    def __init__(self, padded: dict[str, Tensor], counts: Tensor, spare: int) -> None:
        """Take the first counts [B,H] slots of every padded tensor [B,H,C,...], with room for `spare` more each."""
        self.counts = counts.clone()
        self.room = spare  # slots every segment has free at its end
        self.most = padded["positions"].shape[2]
        ends = (counts + spare).flatten().cumsum(0)
        self.starts = ends.view_as(counts) - counts - spare  # [B,H] flat slot at which each segment begins
        self._bounds = [0, *ends.view_as(counts)[:, -1].tolist()]  # of every sequence
        into, taken = self._slots(self.most)
        self.flat: dict[str, Tensor] = {}
        for name, tensor in padded.items():
            flat = tensor.new_full((self._bounds[-1], *tensor.shape[3:]), -1 if name == "positions" else 0)
            flat[into[taken]] = tensor[taken]
            self.flat[name] = flat

    @property
    def nbytes(self) -> int:
        return sum(flat.nbytes for flat in self.flat.values()) + self.counts.nbytes + self.starts.nbytes

    @property
    def spare_nbytes(self) -> int:
        """Those of the slots in which no token lies."""
        slots: int = self._bounds[-1]
        empty = slots - int((self.padded("positions") >= 0).sum())
        return empty * (sum(flat.nbytes for flat in self.flat.values()) // max(slots, 1))

    def _slots(self, most: int) -> tuple[Tensor, Tensor]:
        """Flat slot of each segment's slot 0..most-1, [B,H,most], and which of them are in use."""
        steps = torch.arange(most, device=self.counts.device)
        taken = steps < self.counts[..., None]
        return (self.starts[..., None] + steps).masked_fill(~taken, 0), taken

    def padded(self, name: str) -> Tensor:
        """A copy [B,H,C,...] in which shorter segments end in empty slots (position -1, else 0)."""
        slots, taken = self._slots(self.most)
        view = self.flat[name][slots]
        fill = -1 if name == "positions" else 0
        return view.masked_fill_(~taken.view(*taken.shape, *[1] * (view.dim() - 3)), fill)

    def put(self, name: str, slots: Tensor, values: Tensor | float) -> None:
        """Write [B,H,n,...] at each segment's slots [B,H,n]."""
        self.flat[name][self.starts[..., None] + slots] = values

    def put_all(self, name: str, padded: Tensor) -> None:
        """Write a padded tensor [B,H,C,...] back."""
        slots, taken = self._slots(self.most)
        self.flat[name][slots[taken]] = padded[taken]

    def extend(self) -> Tensor:
        """Open one more slot at the end of every segment and return it, [B,H,1]; only while there is room."""
        slots = self.counts[..., None].clone()
        self.counts += 1
        self.room -= 1
        self.most += 1
        return slots

    def attend(self, queries: Tensor, positions: Tensor, how: AttentionParams) -> Tensor:
        """One query per sequence over all its segments at once: [B,H_q,1,D] at positions [B,1] -> [B,H_q,1,D]."""
        if decodes(queries):
            stored = self.flat["keys"], self.flat["values"], positions, self.flat["positions"]
            asked = how.scaling, how.softcap, how.sliding_window, one_for_all(how.sinks)
            return decode_attention_flat(queries, *stored, self.starts, self.counts, self.most, *asked).out
        return torch.stack([self._attend(row, queries[row, :, 0], positions[row], how) for row in range(len(queries))])

    def _attend(self, row: int, queries: Tensor, position: Tensor, how: AttentionParams) -> Tensor:
        """[H_q,1,D] for one sequence: two matrix products of all heads' queries with all heads' slots.

        A product of a head with another's slots is thrown away. That costs less than many small products: a decoding
        step waits for its keys and values to be read, which is done once, and matrix units work on 16 rows anyway.
        """
        here = slice(self._bounds[row], self._bounds[row + 1])
        keys, values = widen(self.flat["keys"][here]), widen(self.flat["values"][here])
        logits = (widen(queries) * how.scaling) @ keys.T  # [H_q,n]
        if how.softcap is not None:
            logits = how.softcap * torch.tanh(logits / how.softcap)
        seen = self._visible(row, here, position, how)
        group = len(queries) // len(seen)
        logits.view(len(seen), group, -1).masked_fill_(~seen[:, None], -torch.inf)
        something = seen.any(-1, keepdim=True).repeat_interleave(group, dim=0)
        weights = logits.softmax(-1).where(something, 0.0)  # a head that sees nothing gives 0
        if how.sinks is not None:
            weights *= beside_sinks(logits.logsumexp(-1), how.sinks[0])[:, None]
        return (weights @ values)[:, None].to(queries.dtype)

    def _visible(self, row: int, here: slice, position: Tensor, how: AttentionParams) -> Tensor:
        """[H,n] bool: each head's own tokens, not later than the query, inside the model's sliding window."""
        stored = self.flat["positions"][here]
        slots = torch.arange(here.start, here.stop, device=stored.device)
        starts = self.starts[row][:, None]
        seen = (slots >= starts) & (slots < starts + self.counts[row][:, None])
        readable = (stored >= 0) & (stored <= position)
        if how.sliding_window is not None:
            readable &= stored > position - how.sliding_window
        return seen & readable


class RaggedStore(LayerStore):
    """Dense while tokens come in several at a time, segments from the first eviction on."""

    def __init__(self, dense: DenseStore) -> None:
        self._dense: DenseStore | None = dense
        self._statistics = tuple(dense.state)
        self._segments: Segments | None = None
        self._ascending = True
        self._free: Tensor | None = None
        self._to_come: int | None = None

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
        assert self._segments is not None
        return self._segments.padded(name)

    def parts(self) -> dict[str, int]:
        if self._dense is not None:
            return self._dense.parts()
        assert self._segments is not None
        sizes = {name: flat.nbytes for name, flat in self._segments.flat.items()}
        return by_kind(sizes, self._segments.nbytes)

    @property
    def bias(self) -> Tensor | None:
        if self._segments is None or "bias" not in self._segments.flat:
            return self._dense.bias if self._dense else None
        return self._padded("bias")

    @property
    def state(self) -> State:
        return self._dense.state if self._dense else {name: self._padded(name) for name in self._statistics}

    def remember(self, state: State) -> None:
        if self._segments is not None:
            for name, values in state.items():
                self._segments.put_all(name, values)

    @property
    def nbytes(self) -> int:
        if self._dense is not None:
            return self._dense.nbytes
        assert self._segments is not None
        return self._segments.nbytes

    @property
    def spare_nbytes(self) -> int:
        return self._dense.spare_nbytes if self._dense is not None else self._sealed.spare_nbytes

    def expect(self, tokens: int) -> None:
        self._to_come = tokens
        if self._dense is not None:
            self._dense.expect(tokens)

    @property
    def _sealed(self) -> Segments:
        assert self._segments is not None
        return self._segments

    @property
    def packed(self) -> bool:
        return self._dense is not None and self._dense.packed

    @property
    def ascending(self) -> bool:
        return self._dense.ascending if self._dense else self._ascending

    def append(self, keys: Tensor, values: Tensor, positions: Tensor, absent: bool) -> None:
        if self._segments is None or keys.shape[2] > 1 or absent:
            self._open().append(keys, values, positions, absent)
            return
        slots, self._free = self._free, None
        if slots is None:
            if self._segments.room == 0:
                self._seal(self._contents(), self._segments.counts, self._growth())
            slots = self._segments.extend()
        else:
            self._ascending = False
        spread = positions[:, None, :].expand(-1, keys.shape[1], -1).to(torch.int32)
        for name, token in {"keys": keys, "values": values, "positions": spread}.items():
            self._segments.put(name, slots, token)
        for name in self._segments.flat.keys() - {"keys", "values", "positions"}:
            self._segments.put(name, slots, 0.0)

    def segments(self) -> Places:
        """Every KV head's own part of the memory."""
        one = int(self._free is not None)
        held = self._sealed.counts - one
        free = held if self._free is None else self._free[..., 0]
        return Places(self._sealed.starts, held, free, self._sealed.most - one)

    @property
    def slots(self) -> int:
        """Slots of its memory, over all sequences and KV heads."""
        return len(self._sealed.flat["positions"])

    @property
    def sequences(self) -> int:
        """How many it holds."""
        return len(self._sealed.counts)

    @property
    def room(self) -> int:
        """Slots of a KV head behind those in use."""
        return self._sealed.room

    def goes_on(self, evicts: bool) -> bool:
        """Whether the next token has a slot and later ones, if it evicts, the slots of evicted ones."""
        return self._segments is not None and (self.room > 0 or (evicts and self._free is not None))

    @property
    def buffers(self) -> dict[str, Tensor]:
        """All that is held, flat [N,...]."""
        return self._sealed.flat

    def moved(self, flat: Mapping[str, Tensor]) -> "RaggedStore":
        """The layer copied to flat memory {name: [N,...]}: all slots are in use, some of them empty."""
        held = copy(self)
        segments = held._segments = copy(self._sealed)
        for name, x in self._sealed.flat.items():
            flat[name].copy_(x)
        if self._free is not None:
            flat["positions"][(segments.starts + self._free[..., 0]).flatten()] = -1
        segments.flat = dict(flat)
        segments.counts = segments.counts + segments.room
        segments.most, segments.room, held._free = segments.most + segments.room, 0, None
        return held

    def came_back(self, before: Places, grown: int | None, free: Tensor) -> "RaggedStore":
        """What `moved` made as it goes on by itself: so many tokens grew, or (None) slots free [B,H] are empty."""
        held, more = copy(self), 1 if grown is None else grown
        segments = held._segments = copy(self._sealed)
        room = segments.most - before.most - more
        segments.counts, segments.most, segments.room = before.held + more, before.most + more, room
        held._free = None if grown is not None else free[..., None].clone()
        held._ascending = self._ascending and grown is not None
        return held

    def copied_out(self, sequence: int) -> "RaggedStore":
        """Its only sequence, in memory of its own."""
        assert self.sequences == 1, f"sequence {sequence} is beside others, whose heads lie in one piece"
        held = copy(self)
        held._segments = copy(self._sealed)
        held._segments.flat = {name: x.clone() for name, x in self._sealed.flat.items()}
        return held

    def _growth(self) -> int:
        """How many slots to add to every segment: no more than tokens are known to come."""
        growth = block_of(self._to_come)
        self._to_come = self._to_come and max(0, self._to_come - growth)
        return growth

    def _contents(self) -> dict[str, Tensor]:
        return {name: self._padded(name) for name in self._sealed.flat}

    def _open(self) -> DenseStore:
        """The dense form: what is in segments now, padded to the longest segment."""
        if self._dense is None:
            self._dense = DenseStore.of(self._contents(), self._statistics, self._ascending)
            self._segments = self._free = None
        return self._dense

    def _seal(self, padded: dict[str, Tensor], counts: Tensor, spare: int) -> None:
        self._segments, self._dense, self._free = Segments(padded, counts, spare), None, None

    def keep(self, mask: Tensor, spare: int, counts: Sequence[int] | None = None) -> Tensor:
        dense = self._open()
        slots = dense.keep(mask, 0, counts)
        self._seal(dense.contents(), (dense.positions >= 0).sum(-1), spare)
        self._ascending = True
        return slots

    def write(self, slots: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None = None) -> None:
        if self._dense is not None or bias is not None:
            self._open().write(slots, keys, values, bias)
            return
        assert self._segments is not None
        self._segments.put("keys", slots, keys.to(self._segments.flat["keys"].dtype))
        self._segments.put("values", slots, values.to(self._segments.flat["values"].dtype))

    def release(self, slots: Tensor, rows: Sequence[bool] | None) -> None:
        if self._dense is not None or rows is not None:
            self._open().release(slots, rows)
            return
        assert self._segments is not None
        self._segments.put("positions", slots, -1)
        self._free = slots

    def attend(self, queries: Tensor, positions: Tensor, how: AttentionParams) -> Tensor | None:
        if self._segments is None or queries.shape[2] > 1 or "bias" in self._segments.flat:
            return None
        return self._segments.attend(queries, positions, how)


@dataclass(frozen=True)
class Ragged(Store):
    """Keys and values as the model made them; every KV head of every sequence holds only its own tokens."""

    exact = True
    replayable = True

    def open(self, keys: Tensor, values: Tensor, statistics: tuple[str, ...], width: int) -> LayerStore:
        return RaggedStore(DenseStore(keys, values, statistics, width))
