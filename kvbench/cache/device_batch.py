"""Decoding of all dense sequences of a cache at once, where launches cost more than arithmetic: on a GPU.

A layer's sequences, whatever their policies, budgets and lengths, lie in one memory; how many tokens each KV head holds
and where its next one goes stands on the device. So a layer's step is an append and an attention for all of them, and
what they evict follows after the last layer, for all layers of a policy as rows of one batch. The host counts steps and
nothing else: they can be recorded as a CUDA graph. A sequence that ended may ride along in it, its cache copied out.

Shapes: L layers, B sequences, H KV heads, N slots of a layer.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from kvbench.cache.device_evict import DeviceGroup
from kvbench.cache.device_slots import DeviceSlots, Unit, units_of
from kvbench.cache.group import PolicyGroup
from kvbench.cache.layer_rows import LayerRows
from kvbench.cache.state import LayerState
from kvbench.cache.step import Projected
from kvbench.kernels.decode import NewTokens, decode_attention_flat
from kvbench.kernels.prompt import one_for_all
from kvbench.policies.observation import AttentionParams
from kvbench.policies.policy import Policy
from kvbench.policies.stores.batch import BatchStore
from kvbench.policies.stores.per_sequence import PerSequenceStores


def steps_alike(policy: Policy) -> bool:
    """Whether all decoding steps of a policy do the same: each appends a token, and evicts one or none."""
    if policy.granularity == "query_head" or policy.reader is not None or policy.merger.needs.bias:
        return False
    needs = policy.needs
    return not _evicts(policy) or (policy.schedule.one_each and not (needs.model or needs.memory or needs.question))


def can_join(group: PolicyGroup) -> bool:
    """Whether the next steps of these sequences are alike, and have room for their tokens."""
    policy, evicts = group.policy, _evicts(group.policy)
    if group.error is not None or group.within_call or not steps_alike(policy) or (evicts and not group.at_budget):
        return False
    if len({tuple(layer.memory) for layer in group.layers}) > 1:  # a merger has not seen all layers yet
        return False
    for layer in group.layers:
        units = units_of(layer.store) if layer.opened and not layer.unsettled else []
        if not units or not all(unit.goes_on(evicts) for unit in units) or (evicts and not layer.recent.full):
            return False
    return _alike([units_of(layer.store)[0] for layer in group.layers])


def _alike(layers: Sequence[Unit]) -> bool:
    """Whether all layers have as many KV heads of one size, so that they can lie side by side."""
    sizes = {(unit.buffers["keys"].shape[-1], unit.buffers["values"].shape[-1]) for unit in layers}
    return len(sizes) == 1 and len({unit.segments().starts.shape[-1] for unit in layers}) == 1


def _evicts(policy: Policy) -> bool:
    return policy.evicts and policy.schedule.decode == "evict"


class DeviceBatch:
    """The decoding sequences of some groups. Until `close` nothing else appends to their layers or evicts from them.

    replayable: a step needs nothing but its tokens.
    """

    def __init__(self, groups: Sequence[PolicyGroup]) -> None:
        """Move what the layers hold into memory of their own; `can_join` says of which groups that can be done."""
        self.groups = list(groups)
        ends = list(accumulate(group.size for group in groups))
        units = [[units_of(layer.store) for layer in group.layers] for group in groups]
        self.parts = [
            DeviceGroup(group, slice(end - group.size, end), own)
            for group, end, own in zip(groups, ends, units, strict=True)
        ]
        self._units = units
        self._lay_out()
        self.replayable = not any(group.policy.rates for group in groups)
        self._most = max(part.most for part in self.parts)
        self._asked: list[tuple[Tensor, AttentionParams]] = []  # queries [B,H_q,1,D] of the layers so far

    def _lay_out(self) -> None:
        layers = range(len(self._units[0]))
        sizes = [sum(unit.slots for units in self._units for unit in units[layer]) + 1 for layer in layers]
        like = self._units[0][0][0].buffers
        device = like["keys"].device
        positions = torch.full((sum(sizes),), -1, dtype=torch.int32, device=device)
        self._positions = positions.split(sizes)
        memory: dict[str, list[Tensor]] = {"keys": [], "values": []}
        places = []
        for layer in layers:  # one layer is in memory twice
            for name, tensors in memory.items():
                tensors.append(like[name].new_zeros(sizes[layer], like[name].shape[-1]))
            flat = {name: x[layer] for name, x in memory.items()} | {"positions": self._positions[layer]}
            self._move(layer, flat)
            segments = [x for part in self.parts for x in part.segments(layer)]
            places.append([torch.cat([getattr(x, name) for x in segments]) for name in ("starts", "held", "free")])
        starts, held, free = (torch.stack(x) for x in zip(*places, strict=True))
        grows = [not part.evicts for part in self.parts for _ in range(part.size)]
        self._grows = torch.tensor(grows, device=device)[:, None]
        self._goes_on = torch.ones(len(grows), 1, dtype=torch.long, device=device)  # tokens it takes in a step
        group, reads = self.parts[0].group, any(part.reads_newest for part in self.parts)
        wide = group.layers[0].query_heads // starts.shape[2]
        drawn = torch.zeros(sum(sizes), wide, device=device) if reads else None
        self._drawn = None if drawn is None else drawn.split(sizes)
        self.slots = DeviceSlots(
            keys=LayerRows(memory["keys"]),
            values=LayerRows(memory["values"]),
            positions=positions,
            drawn=drawn,
            starts=starts,
            counts=held + (~self._grows).long(),  # the empty slot of those that evict included
            free=free.clone(),
            before=torch.tensor([0, *sizes[:-1]], device=device).cumsum(0)[:, None, None],
            places=torch.tensor([n for part in self.parts for n in part.group.progress.seen], device=device)[:, None],
        )
        self._next = free.clone()  # [L,B,H] the slots of the tokens that come
        self._of_layers = list(zip(*(x.unbind() for x in (starts, self.slots.counts, self._next)), strict=True))
        last = torch.tensor(sizes, device=device)[:, None, None, None] - 1
        for part in self.parts:
            part.lay_out(self.slots, last)

    def _move(self, layer: int, flat: dict[str, Tensor]) -> None:
        first = 0
        for part, units in zip(self.parts, self._units, strict=True):
            more = sum(unit.slots for unit in units[layer])
            moved = units[layer] = part.move(layer, units[layer], flat, first)
            part.group.layers[layer].hold(moved[0] if len(moved) == 1 else PerSequenceStores(moved))
            first += more

    # --- a step ----------------------------------------------------------------------------------------------------
    def begin(self) -> None:
        """Every sequence gets a slot for its next token in all layers."""
        slots = self.slots
        torch.where(self._grows, slots.counts, slots.free, out=self._next)
        slots.counts += self._grows
        there = slots.starts + slots.before + self._next
        slots.positions.scatter_(0, there.flatten(), slots.places.int().expand_as(there).flatten())
        if slots.drawn is not None:
            slots.drawn.zero_()
        for part in self.parts:
            part.begin(self._next)
            part.group.begin_step()
        self._asked.clear()

    def attend(self, layer: int, new: Projected, params: AttentionParams) -> Tensor:
        """Append the new keys and values [B,H,1,D] of a layer and attend: [B,H_q,1,D]."""
        slots, (starts, counts, following) = self.slots, self._of_layers[layer]
        self._asked.append((new.queries, params))
        return decode_attention_flat(
            new.queries,
            slots.keys.layers[layer],
            slots.values.layers[layer],
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
        """The last layer is through: evict."""
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
        """A sequence ended: it takes its last step again and again, holds no more for it, and nobody looks at it."""
        self._grows[place] = False
        self._goes_on[place] = 0
        self._part(place).going -= 1

    def copied(self, place: int) -> tuple[PolicyGroup, int, list[LayerState]]:
        """The group of a sequence, its row there, and a copy of its layers, each as it would be without the batch."""
        part = self._part(place)
        row, units = place - part.here.start, self._units[self.parts.index(part)]
        free = self.slots.free[:, part.here]
        return part.group, row, [part.copied(layer, own, free[layer], row) for layer, own in enumerate(units)]

    def _part(self, place: int) -> DeviceGroup:
        return next(part for part in self.parts if place < part.here.stop)

    def close(self) -> None:
        """Give the layers back to their groups, each as it would be without."""
        for part, units in zip(self.parts, self._units, strict=True):
            for layer in range(len(units)):
                own = part.came_back(layer, units[layer], self.slots.free[layer, part.here])
                part.group.layers[layer] = part.state(layer, own[0] if len(own) == 1 else BatchStore(own))  # type: ignore[arg-type]
                part.group.note_bytes(layer)
