"""Compaction: the tokens of layers outside their targets are merged or dropped, and their slots freed.

Layers with plain slots are rows of one batch, each with a target of its own. Others (codes, pages, heads of different
lengths) are compacted one by one, by their stores.

Shapes: n layers that evict together, H_kv KV heads, T slots.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.cache import attend as backends
from kvbench.cache.rerotate import close_gaps
from kvbench.cache.step import Step
from kvbench.kernels.selection import slots_in_order, spread_index
from kvbench.policies.allocators.allocator import Allocator, StatisticAllocator
from kvbench.policies.constants import on_device
from kvbench.policies.mergers.merger import Eviction
from kvbench.policies.observation import Memory, Observation, State
from kvbench.policies.policy import Policy
from kvbench.policies.ranking import Ranking
from kvbench.policies.stores.paged import PagedStore
from kvbench.policies.stores.slot_store import SlotStore, rewrite
from kvbench.policies.stores.slots import rows_of
from kvbench.policies.stores.store import LayerStore


def takes_rows(step: Step) -> bool:
    """Whether a layer's tokens may be merged and freed as a row of a batch."""
    policy, allocator = step.policy, step.policy.allocator
    if policy.schedule.rerotate or allocator.per_head or type(allocator).heads is not Allocator.heads:
        return False
    if step.layer.ranking is not None and cascades(policy):  # its layers are evicted several times
        return False
    return _plain(step.layer.store)


def cascades(policy: Policy) -> bool:
    """Whether layers of a prompt are evicted as soon as they are measured."""
    return isinstance(policy.allocator, StatisticAllocator) and policy.allocator.cascades


def compact(
    steps: Sequence[Step],
    ranking: Ranking,
    targets: Sequence[int],
    seen: Observation | None = None,
    per_head: Tensor | None = None,
    state: State | None = None,
) -> None:
    """Evict from the layer of each step, down to its target of tokens per KV head, and free the memory.

    per_head [1,H_kv]: number of slots of each head of a single layer, if it is known. state: running statistics of
    several layers.
    """
    for step in steps:
        step.layer.compacted = True
    if per_head is None and takes_rows(steps[0]):
        _compact_rows(steps, ranking, targets, seen, state)
    else:
        (step,), (target,) = steps, targets
        _compact_one(step, ranking, target, seen, per_head)


def _compact_rows(
    steps: Sequence[Step], ranking: Ranking, targets: Sequence[int], seen: Observation | None, state: State | None
) -> None:
    """`compact` for layers with plain slots, as many in every head."""
    first, policy, positions = steps[0], steps[0].policy, ranking.positions
    stores = [step.layer.store for step in steps if isinstance(step.layer.store, SlotStore)]
    most, even, in_order = max(targets), len(set(targets)) == 1, ranking.ascending and ranking.packed
    contents, new = _contents(stores, seen, state), dict[str, Tensor]()
    if even and _by_order(first, ranking):
        slots = ranking.slots(most)
    else:
        counts = on_device(tuple(targets), positions.device)[:, None].expand(positions.shape[:2])
        kept = ranking.select(most if even else counts)
        if policy.merger.merges:
            eviction = Eviction(
                first.layer.index if len(steps) == 1 else -1,
                first.phase,
                contents["keys"],
                contents["values"],
                positions,
                {name: contents[name] for name in policy.needs.statistics},
                kept,
                ranking.occupied & ~kept,
                seen,
                targets if in_order else None,
            )
            new = _merged(steps, eviction, contents)
            slots = eviction.in_order[0].slots
        else:
            slots = slots_in_order(positions, kept, most, in_order, even)
        if seen is not None and policy.scorer is not None and policy.needs.kept:
            policy.scorer.selected(seen, kept)
    rewrite(stores, slots, targets, first.spare, contents, new)
    for step, store, target in zip(steps, stores, targets, strict=True):
        store.kept(target, first.spare)
        step.layer.count, step.layer.ranking = target, None


def _contents(stores: Sequence[SlotStore], seen: Observation | None, state: State | None) -> dict[str, Tensor]:
    """The slots in use of n stores by name, [n,H_kv,T,...]. seen, state: what is known of them."""
    for store in stores:
        store.store_positions()
    known = dict(state or {})
    if seen is not None and len(stores) > 1:
        known |= {"keys": seen.keys, "values": seen.values, "positions": seen.positions}
    parts = [store.contents() for store in stores]
    return {name: known[name] if name in known else rows_of([own[name] for own in parts]) for name in parts[0]}


def _merged(steps: Sequence[Step], eviction: Eviction, contents: dict[str, Tensor]) -> dict[str, Tensor]:
    """Merge evicted tokens into kept ones. Returns what changed of all kept slots in order; other changes are made."""
    memory: Memory = {name: rows_of([step.layer.memory[name] for step in steps]) for name in steps[0].layer.memory}
    merged = steps[0].policy.merger.absorb(eviction, memory)
    for row, step in enumerate(steps):
        step.layer.memory |= {name: x[row : row + 1] for name, x in memory.items()}
    if merged is None:
        return {}
    new = {"keys": merged.keys, "values": merged.values}
    if merged.bias is not None:
        new["bias"] = merged.bias
        contents.setdefault("bias", torch.zeros_like(eviction.positions, dtype=torch.float32))
    if merged.in_order:
        return new
    for name, x in new.items():
        contents[name] = contents[name].scatter(2, spread_index(merged.slots, x), x.to(contents[name].dtype))
    return {}


def _compact_one(step: Step, ranking: Ranking, target: int, seen: Observation | None, per_head: Tensor | None) -> None:
    """`compact` for a layer whose store has a form of its own, or whose heads may differ in their number of slots."""
    layer, policy, held, excess = step.layer, step.policy, step.layer.store, step.layer.count - target
    if per_head is None and policy.allocator.per_head and step.phase == "decode":
        per_head = ranking.occupied.sum(-1) - excess  # each keeps its share
    elif per_head is None:
        per_head = policy.allocator.heads(layer.index, ranking, [target])
    kept = ranking.select(target if per_head is None else per_head)
    if policy.merger.merges:
        view = layer.index, step.phase, held.keys, held.values, held.positions, held.state
        merged = policy.merger.absorb(Eviction(*view, kept, ranking.occupied & ~kept, seen), layer.memory)
        if merged is not None:
            new = merged.slots, merged.keys, merged.values
            held.write(*new) if merged.bias is None else held.write(*new, merged.bias)
    if seen is not None and policy.scorer is not None and policy.needs.kept:
        policy.scorer.selected(seen, kept)
    if policy.schedule.rerotate and not (step.phase == "decode" and excess == 1):
        assert seen is not None, "checked when the policy is built"
        close_gaps(held, kept, seen)
    paged = isinstance(held, PagedStore)
    if paged and per_head is not None:  # whole pages may hold fewer tokens than the target
        target = int(per_head.max())
    slots = held.keep(kept, step.spare, target if per_head is None else None)
    # An allocator may give other numbers than the target; the shape has them without a synchronization.
    layer.count = target if policy.allocator.per_head or paged else max(target, slots.shape[-1])
    if layer.ranking is not None:
        layer.ranking = ranking.at(slots, held.positions, held.slots.packed)


def _plain(held: LayerStore) -> bool:
    """Whether a store keeps exact tokens in slots of equal number in every head, as they are."""
    return isinstance(held, SlotStore) and type(held).keep is SlotStore.keep and held.holds_exact


def _by_order(step: Step, ranking: Ranking) -> bool:
    """Whether a prompt's slots are taken from the order of preference, which budgets of one policy share.

    On a CPU, a threshold on the scores is faster; and what else an eviction does needs a mask of the kept slots.
    """
    policy = step.policy
    if step.phase != "prompt" or backends.backend_of(ranking.scores).reads_at_once or step.layer.ranking is not None:
        return False
    return ranking.ascending and ranking.packed and not (policy.merger.merges or policy.needs.kept)
