"""The slot store: the tokens of one layer in full precision, in slots that are overwritten in place.

Every KV head of every sequence owns a segment of slots. Segments of equal length form tensors [B,H,C,...]. After an
eviction that leaves KV heads with different numbers of tokens, a `ragged` store has flat tensors [N,...], and the start
and length of every segment.

Shapes: B sequences, H KV heads, C slots of a segment, N slots of all segments, D head dim.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.kernels.decode import decode_attention_flat
from kvbench.policies.observation import AttentionParams, State
from kvbench.policies.stores.slot_memory import SlotMemory
from kvbench.policies.stores.slots import GROWTH, extremes, owned, slots_in_order, spread_index, take


class SlotStore(SlotMemory):
    """Slots that are appended to, evicted and overwritten in place."""

    # --- append ----------------------------------------------------------------------------------------------------
    def append(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        if self.starts is not None and keys.shape[2] > 1:
            self._even_out()
        self._enter({"keys": keys, "values": values}, positions)

    def _enter(self, tokens: dict[str, Tensor], positions: Tensor) -> None:
        """Append tokens [B,H,T,...] by name at positions [B,T]."""
        new = positions.shape[1]
        if "positions" in self.memory:
            heads = next(iter(tokens.values())).shape[1]
            spread = positions.to(torch.int32).unsqueeze(1).expand(-1, heads, -1)
            tokens = {**tokens, "positions": spread if new == 1 else spread.contiguous()}
        if self.free is not None and new == 1:
            self._put(self.free, tokens)
            self.free, self._packed, self._marked, self._ascending = None, True, True, False
        elif self.counts is not None:
            self.reserve()
            self._put(self.counts[..., None], tokens)
            self.counts = self.counts + 1
            self.use(self.used + 1, self.room - 1)
        elif self._packed:
            self._write_at_end(tokens, new)
        elif new == 1:
            self._fill_hole(tokens)
        else:  # heads differ in length: write all tokens at the end, then close the gaps
            self._write_at_end(tokens, new)
            self._compact(self.positions >= 0, 0, None)

    def _put(self, slots: Tensor, tokens: Mapping[str, Tensor], all_names: bool = True) -> None:
        """Write [B,H,n,...] by name to slots [B,H,n]; other tensors (statistics) are set to 0 if `all_names`."""
        for name, x in self.memory.items():
            new = tokens.get(name, 0.0)
            if name in tokens or all_names:
                if self.starts is None:
                    x.scatter_(2, spread_index(slots, x), new)
                else:
                    x[self.starts[..., None] + slots] = new

    def _write_at_end(self, tokens: dict[str, Tensor], new: int) -> None:
        used, room = self.used, self.room
        if used == 0 and room < new:  # keep the model's tensors of the first tokens, which are often many
            for name, x in self.memory.items():
                zeros = None if name in tokens else x.new_zeros(*x.shape[:2], new, *x.shape[3:])
                self._hold(name, owned(tokens[name]) if zeros is None else zeros)
            self.lent = True
        elif new > 1 and new > room:
            self._lengthen(new, tokens)
        else:
            self.reserve()
            for name, x in self.memory.items():
                end = x.narrow(2, used, new)
                end.copy_(tokens[name]) if name in tokens else end.zero_()
        self.use(used + new, self.first.shape[2] - used - new)

    def _lengthen(self, more: int, tokens: Mapping[str, Tensor]) -> None:
        """Add slots after those in use of every segment, with the tokens or empty."""
        if self.starts is not None:
            assert self.counts is not None
            self._flatten(self.contents(), self.counts, more)
            return
        for name, x in self.memory.items():
            behind = tokens.get(name)
            if behind is None:
                behind = x.new_full((*x.shape[:2], more, *x.shape[3:]), -1 if name == "positions" else 0)
            self._hold(name, torch.cat([x[:, :, : self.used], behind], dim=2))
        self.room, self.lent = more, False

    def expect(self, tokens: int) -> None:
        self._expected = tokens

    def reserve(self) -> None:
        """Reserve slots if none is left, at most as many as tokens are expected."""
        if self.room == 0:
            growth = GROWTH
            if self._expected:
                growth = min(max(GROWTH, self._expected // 4), self._expected)  # long answers take few copies
                self._expected -= growth
            self._lengthen(growth, {})

    def _fill_hole(self, tokens: dict[str, Tensor]) -> None:
        """Write one token per KV head into its first empty slot; some heads may have no such slot."""
        if not bool((self.positions < 0).any(-1).all()):
            self.reserve()
            self.use(self.used + 1, self.room - 1)
        slots = (self.positions < 0).to(torch.uint8).argmax(-1, keepdim=True)
        self._put(slots, tokens)
        self.free, self._ascending = None, False
        self._packed = bool((self.positions >= 0).all())

    # --- evict and merge -------------------------------------------------------------------------------------------
    def write(self, slots: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None = None) -> None:
        if bias is not None:
            self._even_out()
            if "bias" not in self.memory:
                places = self.memory["positions"]
                self._hold("bias", torch.zeros(places.shape, dtype=torch.float32, device=places.device))
            self.memory["bias"].scatter_(2, slots, bias)
        if self.lent:
            for name in ("keys", "values"):
                self._hold(name, self.memory[name].clone())
            self.lent = False
        new = {"keys": keys.to(self.memory["keys"].dtype), "values": values.to(self.memory["values"].dtype)}
        self._put(slots, new, all_names=False)

    def release(self, slots: Tensor) -> None:
        if self.starts is not None:
            self.memory["positions"][self.starts[..., None] + slots] = -1
            self.free = slots
            return
        self._store_positions()
        self.free = None
        if self._packed:
            self.free, self._marked = slots, False
        else:
            self.positions.scatter_(-1, slots, -1)
        self._packed = False

    def keep(self, mask: Tensor, spare: int, count: int | None = None) -> Tensor:
        self._even_out()
        self._store_positions()
        ragged = self._ragged and not mask.is_meta
        slots = self._compact(mask, 0 if ragged else spare, count)
        self._whole = False
        if ragged:
            self._flatten(self.contents(), (self.positions >= 0).sum(-1), spare)
        return slots

    @property
    def ragged(self) -> bool:
        """Whether heads may have, or will have, different numbers of slots."""
        return self._ragged or self.starts is not None

    def keep_slots(self, slots: Tensor, spare: int) -> Tensor:
        """`keep` for slots [B,H,n] in order of position, if no slot is empty."""
        assert self._packed
        assert not self.ragged
        self._store_positions()
        self._move(slots, spare)
        self.use(slots.shape[2], spare)
        self._ascending, self._whole, self.free, self.lent = True, False, None, False
        return slots

    def replace(self, contents: State, ascending: bool, spare: int = 0) -> None:
        """Replace all tensors by [B,H,n,...] of kept tokens; only the last `spare` slots are empty."""
        for name, x in contents.items():
            self._hold(name, x)
        self.use(contents["positions"].shape[2] - spare, spare)
        self._packed, self._ascending, self._whole = True, ascending, False
        self.free, self.lent = None, False

    def _compact(self, mask: Tensor, spare: int, count: int | None) -> Tensor:
        most, least = extremes(mask, count)
        slots = self._gather(mask, most, spare, even=most == least)
        self.use(most, spare)
        self._packed, self._ascending, self.free, self.lent = most == least, True, None, False
        return slots

    def _gather(self, mask: Tensor, most: int, spare: int, even: bool) -> Tensor:
        """Move the slots of the mask to the front, at most `most` per KV head (even: exactly), then `spare` slots."""
        if not self.used:  # a sequence without a token
            self._lengthen(spare, {})
            return mask.long()
        slots = slots_in_order(self.positions, mask, most, even and self._ascending)
        staying = None if even else mask.gather(-1, slots)
        self._move(slots, spare)
        if staying is not None:
            self.memory["positions"].narrow(2, 0, most).masked_fill_(~staying, -1)
        return slots

    def _move(self, slots: Tensor, spare: int) -> None:
        """Move slots [B,H,n] to the front, followed by `spare` empty ones."""
        places = F.pad(slots, (0, spare))  # the spare slots are emptied below
        for name, x in self.memory.items():
            self._hold(name, take(x[:, :, : self.used], places))
            self.memory[name].narrow(2, slots.shape[2], spare).fill_(-1 if name == "positions" else 0)

    # --- segments of different lengths -----------------------------------------------------------------------------
    def _flatten(self, padded: Mapping[str, Tensor], counts: Tensor, spare: int) -> None:
        """Store the first counts [B,H] slots of padded tensors [B,H,C,...] in segments with `spare` more slots each."""
        ends = (counts + spare).flatten().cumsum(0)
        self.starts, self.counts = ends.view_as(counts) - counts - spare, counts.clone()
        self.used, self.room, self.free = padded["positions"].shape[2], spare, None
        into, taken = self._flat_slots()
        for name, x in padded.items():
            flat = x.new_full((int(ends[-1]), *x.shape[3:]), -1 if name == "positions" else 0)
            flat[into[taken]] = x[taken]
            self._hold(name, flat)
        self._views.clear()

    def _even_out(self) -> None:
        """Turn flat memory into tensors [B,H,C,...] again, padded to the longest segment."""
        if self.starts is not None:
            self.memory, self.starts, self.counts = self.contents(), None, None
            self.free, self._bytes, self.room, self._expected = None, None, 0, None
            self._packed = bool((self.memory["positions"] >= 0).all())
            self._views.clear()

    def attend(self, queries: Tensor, positions: Tensor, how: AttentionParams) -> Tensor | None:
        if self.starts is None or self.counts is None or queries.shape[2] > 1 or "bias" in self.memory:
            return None
        stored = self.memory["keys"], self.memory["values"], positions, self.memory["positions"]
        params = how.scaling, how.softcap, how.sliding_window, how.layer_sinks
        return decode_attention_flat(queries, *stored, self.starts, self.counts, self.used, *params).out
