"""Decoding of all dense sequences of a cache at once, where launches cost more than arithmetic: on a GPU.

The sequences of a layer, whatever their policies, budgets and lengths, lie in one flat memory, an arena; every KV head
has a segment of it, whose start, number of slots in use and next free slot stand on the device. So a layer's step is an
append and an attention for all sequences, and what they evict follows after the last layer, for several layers of a
policy as rows of one batch (`kvbench.cache.device_part`). A sequence below its budget grows until it has one slot more
than its budget, then evicts one token for every new one. The host counts steps and nothing else, so a step can be
recorded as a CUDA graph. A sequence that ended may stay in the batch while its cache is copied out.

Shapes: L layers, B sequences, H_q query heads, H KV heads, N slots of a layer, D head dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.cache.attention import QKV
from kvbench.cache.device_part import Arena, DevicePart, evicts, to_grow, units_of
from kvbench.cache.group import PolicyGroup
from kvbench.cache.state import LayerState
from kvbench.kernels.decode import decode_attention_flat
from kvbench.kernels.prompt import one_for_all
from kvbench.kernels.references import NewTokens
from kvbench.policies.observation import AttentionParams
from kvbench.policies.policy import Policy


def steps_alike(policy: Policy) -> bool:
    """Whether all decoding steps of a policy do the same: each appends a token, and evicts one or none."""
    if policy.granularity == "query_head" or policy.reader is not None or policy.merger.needs.bias:
        return False
    needs = policy.needs
    return not evicts(policy) or (policy.schedule.one_each and not (needs.model or needs.memory or needs.question))


def can_join(group: PolicyGroup) -> bool:
    """Whether the next steps of these sequences are alike, and have slots for their tokens."""
    policy, evicting = group.policy, evicts(group.policy)
    if group.error is not None or group.within_call or not steps_alike(policy):
        return False
    if len({tuple(layer.memory) for layer in group.layers}) > 1:  # a merger has not seen all layers yet
        return False
    # Heads of different budgets have no common length to grow to; a merger's thresholds begin with its first eviction.
    if evicting and (policy.allocator.per_head or policy.merger.merges) and not group.at_budget:
        return False
    shapes = set()
    for layer in group.layers:
        units = units_of(layer.store) if layer.opened and not layer.unsettled else []
        if not units or not all(unit.starts is not None or unit.packed or unit.free is not None for unit in units):
            return False
        if any(unit.free is None and unit.room == 0 for unit in units) or (evicting and not layer.recent.full):
            return False
        if evicting and len(set(to_grow(group, layer, units))) > 1:
            return False
        if evicting and min(to_grow(group, layer, units)) < 0:
            return False
        keys, values = (units[0].memory[name] for name in ("keys", "values"))
        shapes.add((keys.shape[-1], values.shape[-1], units[0].memory["positions"].shape[1:-1], keys.device))
    heads = {layer.store.positions.shape[1] for layer in group.layers}
    return len({(key, value, device) for key, value, _, device in shapes}) == 1 and len(heads) == 1


class DeviceBatch:
    """The decoding sequences of some groups. Until `close` nothing else appends to their layers or evicts from them.

    replayable: a step needs nothing but its tokens.
    """

    def __init__(self, groups: Sequence[PolicyGroup]) -> None:
        """Move what the layers hold into an arena; `can_join` says of which groups that can be done."""
        self.groups = list(groups)
        self.replayable = not any(group.policy.rates for group in groups)
        self.parts, first = [], 0
        for group in groups:
            self.parts.append(DevicePart(group, slice(first, first + group.size)))
            first += group.size
        self.slots = self._lay_out()
        slots = self.slots
        self._next = slots.free.clone()  # [L,B,H] the slots of the tokens that come
        sizes = [len(keys) for keys in slots.keys]
        self._positions = slots.positions.split(sizes)
        self._drawn = None if slots.drawn is None else slots.drawn.split(sizes)
        self._of_layers = list(zip(*(x.unbind() for x in (slots.starts, slots.counts, self._next)), strict=True))
        self._goes_on = torch.ones_like(slots.places)  # tokens a sequence takes in a step
        self._most = max(part.most for part in self.parts)
        self._asked: list[tuple[Tensor, AttentionParams]] = []  # queries [B,H_q,1,D] of the layers so far

    def _lay_out(self) -> Arena:
        layers = range(len(self.groups[0].layers))
        units = [[units_of(group.layers[layer].store) for group in self.groups] for layer in layers]
        like, sizes = units[0][0][0].memory, [sum(u.slots for some in of for u in some) + 1 for of in units]
        device = like["keys"].device
        positions = torch.full((sum(sizes),), -1, dtype=torch.int32, device=device)
        before = torch.tensor([0, *sizes[:-1]], device=device).cumsum(0)
        keys, values, found = [], [], []
        for layer, own_positions in zip(layers, positions.split(sizes), strict=True):  # one layer is in memory twice
            keys.append(like["keys"].new_zeros(sizes[layer], like["keys"].shape[-1]))
            values.append(like["values"].new_zeros(sizes[layer], like["values"].shape[-1]))
            flat = {"keys": keys[-1], "values": values[-1], "positions": own_positions}
            begin, segments = 0, []
            for part, some in zip(self.parts, units[layer], strict=True):
                segments += part.move(layer, some, flat, begin)
                begin += sum(unit.slots for unit in some)
            found.append([torch.cat(x) for x in zip(*segments, strict=True)])
        starts, counts, free, limit = (torch.stack(x) for x in zip(*found, strict=True))
        wide = self.groups[0].layers[0].query_heads // starts.shape[2]
        reads = any(part.reads_newest for part in self.parts)
        drawn = torch.zeros(sum(sizes), wide, device=device) if reads else None
        seen = [n for group in self.groups for n in group.progress.seen]
        places = torch.tensor(seen, device=device)[:, None]
        arena = Arena(keys, values, positions, drawn, starts, counts, free, limit, before[:, None, None], places)
        for part in self.parts:
            part.share(arena, before + torch.tensor(sizes, device=device) - 1)
        return arena

    # --- a step ----------------------------------------------------------------------------------------------------
    def begin(self) -> None:
        """Every sequence gets a slot for its next token in all layers."""
        slots = self.slots
        grows = slots.counts < slots.limit
        torch.where(grows, slots.counts, slots.free, out=self._next)
        slots.counts += grows
        there = slots.starts + slots.before + self._next
        slots.positions.scatter_(0, there.flatten(), slots.places.int().expand_as(there).flatten())
        if slots.drawn is not None:
            slots.drawn.zero_()
        for part in self.parts:
            part.begin(self._next)
        self._asked.clear()

    def attend(self, layer: int, new: QKV, params: AttentionParams) -> Tensor:
        """Append the new keys and values [B,H,1,D] of a layer and attend: [B,H_q,1,D]."""
        slots, (starts, counts, following) = self.slots, self._of_layers[layer]
        self._asked.append((new.queries, params))
        return decode_attention_flat(
            new.queries,
            slots.keys[layer],
            slots.values[layer],
            slots.places,
            self._positions[layer],
            starts,
            counts,
            self._most,
            params.scaling,
            params.softcap,
            params.sliding_window,
            one_for_all(params.sinks),
            sums=None if self._drawn is None else self._drawn[layer],
            new_tokens=NewTokens(new.keys, new.values, following),
        ).out

    def end(self) -> None:
        """The last layer has attended: evict."""
        evicting = [part for part in self.parts if part.evicts and part.group.error is None]
        if evicting:
            queries, params = zip(*self._asked, strict=True)
            newest = torch.stack(queries)
            for part in evicting:
                part.evict(self.slots, newest, params)
        self.slots.places += self._goes_on

    @property
    def room(self) -> int:
        """Steps until a store has to grow; 0 where every sequence ended."""
        return min((part.room for part in self.parts if part.going), default=0)

    def count(self, steps: int) -> None:
        """The host's side of so many steps."""
        for part in self.parts:
            part.count(steps)

    def halt(self, place: int) -> None:
        """A sequence ended: it repeats its last step, and what it holds is not used any more."""
        self.slots.limit[:, place] = self.slots.counts[:, place]
        self._goes_on[place] = 0
        self._part(place).going -= 1

    def copied(self, place: int) -> tuple[PolicyGroup, int, list[LayerState]]:
        """The group of a sequence, its row there, and a copy of its layers, each as it would be without the batch."""
        part = self._part(place)
        row = place - part.here.start
        return part.group, row, [part.state(layer, slice(row, row + 1)) for layer in range(len(part.units))]

    def _part(self, place: int) -> "DevicePart":
        return next(part for part in self.parts if place < part.here.stop)

    def close(self) -> None:
        """Give the layers back to their groups, each as it would be without."""
        for part in self.parts:
            for layer in range(len(part.units)):
                part.group.layers[layer] = part.state(layer)
                part.group.note_bytes(layer)
