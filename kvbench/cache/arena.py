"""The arena of a `DeviceBatch`: the slots of all its sequences in flat tensors, which CUDA graphs can address.

Shapes: L layers, S sequences, H KV heads, N slots of a layer, G' statistics of a slot, D head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvbench.cache.group import PolicyGroup
from kvbench.cache.state import LayerState
from kvbench.policies.observation import AttentionParams
from kvbench.policies.policy import Policy
from kvbench.policies.stores.slot_store import SlotStore

ENDLESS = 1 << 30  # slots that a sequence may take if it does not evict


def evicts(policy: Policy) -> bool:
    """Whether decoding evicts."""
    return policy.evicts and policy.schedule.decode == "evict"


def steps_alike(policy: Policy) -> bool:
    """Whether all decoding steps of a policy are equal: each appends a token, and evicts one or none."""
    if policy.granularity == "query_head" or policy.reader is not None or policy.merger.needs.bias:
        return False
    needs = policy.needs
    return not evicts(policy) or (policy.schedule.one_each and not (needs.model or needs.memory or needs.question))


def can_join(group: PolicyGroup) -> bool:
    """Whether a `DeviceBatch` can take the next step of a group, which is one sequence."""
    policy, evicting = group.policy, evicts(group.policy)
    if group.size != 1 or group.error is not None or group.within_call or not steps_alike(policy):
        return False
    if len({tuple(layer.memory) for layer in group.layers}) > 1:  # a merger has not seen all layers yet
        return False
    # Heads with different budgets do not grow alike; the thresholds of a merger begin with its first eviction.
    if evicting and (policy.allocator.per_head or policy.merger.merges) and not group.at_budget:
        return False
    shapes = set()
    for layer in group.layers:
        store = layer.store if layer.opened and not layer.unsettled else None
        if type(store) is not SlotStore or store.slots.bias is not None:
            return False
        if (store.starts is None and not store.slots.packed and store.free is None) or (
            store.free is None and store.room == 0
        ):
            return False
        if evicting and (not layer.recent.full or slots_to_grow(group, layer, store) < 0):
            return False
        keys, values = store.memory["keys"], store.memory["values"]
        shapes.add((keys.shape[-1], values.shape[-1], store.positions.shape[1], keys.device))
    return len(shapes) == 1


def slots_to_grow(group: PolicyGroup, layer: LayerState, store: SlotStore) -> int:
    """Slots that a layer takes until each new token replaces an evicted one."""
    if not evicts(group.policy):
        return ENDLESS
    if group.policy.allocator.per_head:
        return 0 if store.free is not None else 1
    return group.budgets.of(layer.index, [True])[0] + 1 - store.used


@dataclass
class Arena:
    """Slots of all layers. The last slot of a layer is always empty: it pads shorter segments.

    keys, values: [N,D] of each layer. positions, statistics: of all layers one after another, -1 = empty, [...,G'] by
    name and G'. weights: attention [...,G] of the newest queries, alike, if a policy uses it. starts, counts, free,
    limit [L,S,H]: the start of a segment in its layer, the slots that attention reads, and the one that the next token
    takes when `limit` slots are in use. before [L,1,1]: slots of earlier layers. places [S,1]: positions of the next
    tokens. nan [L,S]: whether a score was NaN.
    """

    keys: list[Tensor]
    values: list[Tensor]
    positions: Tensor
    statistics: dict[tuple[str, int], Tensor]
    weights: Tensor | None
    starts: Tensor
    counts: Tensor
    free: Tensor
    limit: Tensor
    before: Tensor
    places: Tensor
    nan: Tensor


@dataclass
class Segment:
    """The slots of a sequence in a layer. used, room, tokens: at the first step; grow: see `slots_to_grow`."""

    store: SlotStore
    layer: LayerState
    grow: int
    free: Tensor  # of the arena, [1,H,1]
    evicts: bool
    used: int = field(init=False)
    room: int = field(init=False)
    tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.used, self.room, self.tokens = self.store.used, self.store.room, self.layer.counts[0]

    def update(self, steps: int) -> None:
        """Set the lengths of store and layer after `steps` steps."""
        taken = min(steps, self.grow)
        full = self.evicts and taken == self.grow
        self.store.use(self.used + taken, self.room - taken)
        self.store.free = self.free if full else None
        self.layer.counts = [self.tokens + taken - (full and self.grow > 0)]


@dataclass
class Part:
    """Consecutive sequences of one rule, `here` among those of the batch.

    window: queries [L,b,H_q,w,D] and positions [L,b,w]. memory: of mergers, [L,b,...] by name. plan: layers that are
    evicted at once, and parameters of their attention.
    """

    groups: list[PolicyGroup]
    here: slice
    window: list[Tensor] | None
    memory: dict[str, Tensor]
    plan: list[tuple[tuple[int, ...], AttentionParams]] | None = None

    @property
    def policy(self) -> Policy:
        """The policy of the sequences, whose budgets may differ."""
        return self.groups[0].policy


def lay_out(groups: Sequence[PolicyGroup], grow: Sequence[Sequence[int]]) -> Arena:
    """Move the layers of the groups into an arena. grow: see `slots_to_grow`, by group and layer."""
    layers = range(len(groups[0].layers))
    stores = [[slot_store(group.layers[layer]) for group in groups] for layer in layers]
    like, sizes = stores[0][0].memory, [sum(store.capacity for store in some) + 1 for some in stores]
    device, total = like["keys"].device, sum(sizes)
    before = torch.tensor([0, *sizes[:-1]], device=device).cumsum(0)
    positions, keys, values, found = torch.full((total,), -1, dtype=torch.int32, device=device), [], [], []
    statistics: dict[tuple[str, int], Tensor] = {}
    first = 0
    for layer, size in zip(layers, sizes, strict=True):  # so that only one layer exists twice at a time
        keys.append(like["keys"].new_zeros(size, like["keys"].shape[-1]))
        values.append(like["values"].new_zeros(size, like["values"].shape[-1]))
        begin, segments = 0, []
        for place, store in enumerate(stores[layer]):
            here = slice(begin, begin + store.capacity)
            there = slice(first + here.start, first + here.stop)
            memory = {"keys": keys[-1][here], "values": values[-1][here], "positions": positions[there]}
            for name, x in store.memory.items():
                if name not in memory:
                    key = name, x.shape[-1]
                    statistics.setdefault(key, x.new_zeros(total, x.shape[-1]))
                    memory[name] = statistics[key][there]
            moved = _moved(store, memory)
            groups[place].layers[layer].store, stores[layer][place] = moved, moved
            starts, held, free, _ = moved.segments()
            counts = held + (store.free is not None)
            segments.append((starts + begin, counts, free, counts + grow[place][layer]))
            begin = here.stop
        found.append([torch.cat(x) for x in zip(*segments, strict=True)])
        first += size
    starts, counts, free, limit = (torch.stack(x) for x in zip(*found, strict=True))
    reads = any(evicts(group.policy) and group.policy.needs.newest_row for group in groups)
    wide = groups[0].layers[0].query_heads // starts.shape[2]
    weights = torch.zeros(total, wide, device=device) if reads else None
    places = torch.tensor([group.progress.seen for group in groups], device=device)
    nan = torch.zeros(starts.shape[:2], dtype=torch.bool, device=device)
    lengths = starts, counts, free, limit, before[:, None, None]
    return Arena(keys, values, positions, statistics, weights, *lengths, places, nan)


def slot_store(layer: LayerState) -> SlotStore:
    assert isinstance(layer.store, SlotStore)
    return layer.store


def _moved(store: SlotStore, memory: dict[str, Tensor]) -> SlotStore:
    """The same tokens in other memory, [slots,...] by name."""
    store.positions  # noqa: B018 - marks the free slots
    views = {name: memory[name].view(x.shape) for name, x in store.memory.items()}
    for name, x in store.memory.items():
        views[name].copy_(x)
    moved = store.with_memory(views, store.free)
    moved.lent = False
    return moved
