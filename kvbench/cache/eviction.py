"""Evictions: which are due, when they are carried out, and how.

Which: after a step every layer that holds more than its budget, where the schedule evicts (`EvictionJob`). When: at
once; at the end of the call, where every sequence evicts one token, so that all layers do it as one batch; once all
layers are measured, where an allocator shares the budget out by their statistics; once a pre-pass has its scores.
How: score, rank, select; then one token leaves its slot to the next (`one_each`), or what is kept moves together
(`_compact`).

Shapes: n layers, B sequences, H_q query heads, H_kv KV heads, T slots of the fullest layer, D head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from kvbench.cache.attention import LayerStep
from kvbench.cache.group import PolicyGroup
from kvbench.cache.rerotate import close_gaps
from kvbench.cache.state import LayerState
from kvbench.policies.allocators.allocator import JointAllocator, StatisticAllocator
from kvbench.policies.constants import on_device
from kvbench.policies.mergers.merger import Eviction, Merged, OneEviction, Vectors
from kvbench.policies.observation import Memory, Observation, Phase, State
from kvbench.policies.policy import Policy
from kvbench.policies.pre_passes.pre_pass import TokenRating
from kvbench.policies.ranking import Ranking
from kvbench.policies.scorers.scorer import protected_counts
from kvbench.policies.stacked import StackedObservation, batches, kind
from kvbench.policies.stores.slot_store import SlotStore
from kvbench.policies.stores.slots import padded
from kvbench.policies.stores.store_list import StoreList


@dataclass(frozen=True, eq=False)
class EvictionJob:
    """A layer step after which sequences may hold more than their budget."""

    group: PolicyGroup
    layer: LayerState
    step: LayerStep

    @cached_property
    def excess(self) -> list[int]:
        """Tokens per KV head to evict, for each sequence: those beyond the budget, 0 where it is not its turn."""
        now, counts, budgets = self.step.now, self.layer.counts[self.step.rows], self.step.observation.budgets
        excess = [n - b if due else 0 for due, n, b in zip(now.evicts, counts, budgets, strict=True)]
        every = self.group.policy.schedule.every
        return excess if every == 1 or now.phase != "decode" else [n if n >= every else 0 for n in excess]

    @property
    def in_place(self) -> bool:
        """Whether an evicted token leaves its slot to the next: while decoding, and in a prompt's blocks of one.

        A prompt's first eviction compacts, and so does every one that deals out a layer's slots anew, or after which
        the layer grows.
        """
        policy = self.group.policy
        decodes = self.step.now.phase == "decode"
        return decodes or (self.layer.store.evicted and not policy.allocator.per_head and layers_alike(policy))

    @property
    def as_batch(self) -> bool:
        """Whether it may be evicted with other layers: one token, decoded or a block, in every sequence.

        In a prompt only where the layer is at its size already: until then it may hold much more than its budget.
        """
        step, store = self.step, self.layer.store
        one = step.alone and step.now.aligned and step.queries.shape[2] == 1
        dense = isinstance(store, SlotStore) and store.starts is None
        return one and (dense or isinstance(store, StoreList)) and layers_alike(self.group.policy) and self.in_place


def layers_alike(policy: Policy) -> bool:
    """Whether all layers may be rows of one batch when each evicts a token after a decoded one."""
    return policy.evicts and policy.schedule.one_each and not (policy.needs.kept or policy.needs.layer)


class Evictions:
    """The evictions of a cache, in the order in which they are due."""

    def __init__(self) -> None:
        self._read: list[tuple[PolicyGroup, LayerState, LayerStep]] = []  # layers that later ones read too
        self._end_of_call: list[EvictionJob] = []
        self._pre_pass: list[EvictionJob] = []

    def add(self, group: PolicyGroup, layer: LayerState, step: LayerStep, later: bool = False) -> None:
        """A layer has attended: evict now, or when all that the eviction waits for is known.

        later: once other layers, which read what this one holds, have attended too.
        """
        if later:
            self._read.append((group, layer, step))
            return
        now, pending = step.now, EvictionJob(group, layer, step)
        if step.observed:
            if pending.as_batch:
                due = [replace(pending, step=part) for part in step.parts or (step,)]
                if step.params.latents is None:
                    self._end_of_call += due
                    return
                for one in due:  # at once: what was expanded of all layers would take more memory than the cache
                    evict([one])
            elif group.policy.pre_pass is not None and now.phase != "decode":
                layer.unsettled = True
                without = replace(step.observation, queries=step.queries[:, :, :0].clone())
                self._pre_pass.append(replace(pending, step=replace(step, observe=lambda _: without)))
            else:
                _evict_or_rank(pending)
            layer.limit_window(now)
        group.settle(layer.index, now.prompt_done)

    def end_call(self) -> None:
        """The last layer has attended: carry out the evictions that waited for it."""
        read, self._read = self._read, []
        for group, layer, step in read:
            try:
                self.add(group, layer, step)
            except Exception as error:
                group.fail(error)
        due, self._end_of_call = self._end_of_call, []
        evict(due)
        for layer, pending in {pending.layer: pending for pending in due}.items():
            layer.limit_window(pending.step.now)
            pending.group.settle(layer.index, pending.step.now.prompt_done)

    def pre_pass_done(self) -> None:
        """What a pre-pass computes of the prompt is known: score it, and evict where that is due."""
        due, self._pre_pass = self._pre_pass, []
        for pending in due:
            if pending.group.error is not None:
                continue
            pending.layer.unsettled = False
            try:
                _evict_or_rank(pending)
            except Exception as error:
                pending.group.fail(error)
            pending.group.settle(pending.layer.index, pending.step.now.prompt_done)


def _evict_or_rank(pending: EvictionJob) -> None:
    """Evict, or rank a prompt where an allocator divides the budget once all layers are ranked."""
    group, layer, now = pending.group, pending.layer, pending.step.now
    allocator = group.policy.allocator
    if now.phase == "decode" or not isinstance(allocator, StatisticAllocator | JointAllocator):
        evict([pending])
        return
    _observe(pending)
    if any(now.evicts):
        layer.ranking = group.policy.rank(pending.step.observation, layer.store.state)
        _note_not_numbers([pending], layer.ranking)
        layer.unsettled = True
        if isinstance(allocator, StatisticAllocator):
            _measure(pending, allocator)
        elif layer.index == len(group.layers) - 1:
            _compact_jointly(pending, allocator)


def evict(due: Sequence[EvictionJob]) -> None:
    """Bring layers back to their budgets: those that are alike as rows of one batch, a lone one as a batch of one.

    An error ends the groups it came about in, where they are `isolated`; else it is raised.
    """
    alike: dict[object, list[EvictionJob]] = {}
    for pending in due:
        try:
            _observe(pending)
            excess = pending.excess
            if max(excess) > 0:
                single = len(due) > 1 and min(excess) == max(excess) == 1
                traces = tuple((name, x.shape[1:]) for name, x in pending.layer.memory.items())
                key = (pending.group.rule, traces, *kind(pending.step.observation)) if single else pending
                alike.setdefault(key, []).append(pending)
        except Exception as error:
            pending.group.fail(error)
    for some in alike.values():
        for rows in batches([pending.step.observation for pending in some], some[0].group.policy):
            try:
                _evict_batch([some[row] for row in rows])
            except Exception as error:
                for row in rows:
                    some[row].group.fail(error)


def _observe(pending: EvictionJob) -> None:
    """Let the scorer update its running statistics and its memory by a step."""
    policy, held = pending.group.policy, pending.step.store
    if policy.needs.statistics or policy.needs.memory:
        state, seen = held.state, pending.step.observation
        observe(policy, seen, state)
        held.remember(state)
        _remember([pending], seen.memory if policy.needs.memory else {})


def observe(policy: Policy, seen: Observation, state: State) -> None:
    """Update a policy's running statistics, in place."""
    assert policy.scorer is not None
    policy.scorer.observe(seen, state)
    if isinstance(policy.pre_pass, TokenRating):
        policy.pre_pass.observe(seen, state)


def _evict_batch(some: Sequence[EvictionJob]) -> None:
    """Score and evict in layers of one kind, all at once."""
    first = some[0]
    policy = first.group.policy
    for pending in some:
        pending.group.count_evicted(pending.layer, pending.step.rows, pending.excess)
    seen = first.step.observation if len(some) == 1 else StackedObservation([p.step.observation for p in some])
    states = [pending.step.store.state for pending in some]
    state = {name: padded([own[name] for own in states]) for name in states[0]}
    ranking = policy.rank(seen, state)
    _note_not_numbers(some, ranking)
    if max(first.excess) > 1 or not first.in_place:
        assert len(some) == 1, "layers that evict several tokens do so one by one"
        kept = _compact(first.group, first.layer, ranking, seen.budgets, first.excess, seen.phase, seen)
        if policy.scorer is not None and policy.needs.kept:
            policy.scorer.selected(seen, kept)
        return
    over = tuple(n > 0 for pending in some for n in pending.excess)
    going = None if all(over) else on_device(over, ranking.scores.device)[:, None, None]
    stores = [pending.step.store for pending in some]
    memory: Memory = {}
    vectors: tuple[Vectors, ...] = ()
    if policy.merger.merges:
        memory = _memory(some)
        vectors = Vectors([store.keys for store in stores]), Vectors([store.values for store in stores])
    index, packed = first.layer.index if len(some) == 1 else -1, all(store.packed for store in stores)
    victims, merged = one_each(policy, ranking, seen, state, vectors, memory, going, index, packed)
    rows = _rows(some)
    if memory or policy.merger.merges:
        _remember(some, memory)
    if merged is not None:
        for store, *new in zip(stores, *(x.split(rows) for x in merged[:3]), strict=True):
            store.write(*new)
    for pending, store, slots in zip(some, stores, victims.split(rows), strict=True):
        store.release(slots, None if going is None else [n > 0 for n in pending.excess])


def one_each(
    policy: Policy,
    ranking: Ranking,
    seen: Observation,
    state: State,
    vectors: Sequence[Vectors],
    memory: Memory,
    going: Tensor | None,
    layer: int = -1,
    packed: bool = False,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
    """The slot [B,H_kv,1] of the token that every KV head evicts, and what a merger writes: slots, keys, values.

    going [B,1,1] bool: sequences that evict; None: all do. vectors: keys and values, for mergers, which update
    `memory`. layer: its index, -1 for several.
    """
    victims, written = ranking.victim(), None
    if policy.merger.merges:
        keys, values = vectors
        eviction = OneEviction(layer, seen.phase, keys, values, seen.positions, state, victims, going, packed)
        merged = policy.merger.absorb_one(eviction, memory)
        if merged is not None:
            assert merged.bias is None, "a bias is fitted where several tokens go"
            written = merged.slots, merged.keys, merged.values
    if policy.scorer is not None and policy.needs.kept:
        stays = torch.zeros_like(victims, dtype=torch.bool) if going is None else ~going.expand_as(victims)
        policy.scorer.selected(seen, ranking.occupied.scatter(-1, victims, stays))
    return victims, written


def _memory(some: Sequence[EvictionJob]) -> Memory:
    """What is remembered of these sequences."""
    own = [{name: x[pending.step.rows] for name, x in pending.layer.memory.items()} for pending in some]
    return own[0] if len(own) == 1 else {name: torch.cat([part[name] for part in own]) for name in own[0]}


def _remember(some: Sequence[EvictionJob], memory: Memory) -> None:
    for name, x in memory.items():
        for pending, own in zip(some, x.split(_rows(some)), strict=True):
            kept = pending.layer.memory
            if name not in kept:
                kept[name] = own.new_zeros(len(pending.layer.counts), *own.shape[1:])
            kept[name][pending.step.rows] = own


def _compact(
    group: PolicyGroup,
    layer: LayerState,
    ranking: Ranking,
    budgets: Sequence[int],
    excess: Sequence[int],
    phase: Phase,
    seen: Observation | None = None,
    per_head: Tensor | None = None,
) -> Tensor:
    """Evict to the budgets, in the sequences with tokens in `excess`, and free the memory. per_head [B,H_kv]: slots, if
    known.

    Returns the slots that stayed, bool [B,H_kv,T].
    """
    policy, held = layer.policy, layer.store
    over = [n > 0 for n in excess]
    if per_head is None and policy.allocator.per_head and phase == "decode":
        per_head = ranking.occupied.sum(-1) - ranking.seen.new_tensor(excess)[:, None]  # each keeps its own share
    elif per_head is None:
        per_head = policy.allocator.heads(layer.index, ranking, budgets)
    counts: Tensor | int | None = per_head
    if counts is None:
        same = len(set(budgets)) == 1
        counts = budgets[0] if same else ranking.seen.new_tensor(budgets)[:, None].expand(ranking.scores.shape[:2])
    kept = ranking.select(counts)
    if not all(over):
        kept |= ranking.occupied & ~torch.tensor(over, device=kept.device)[:, None, None]
    if policy.merger.merges:
        evicted = ranking.occupied & ~kept
        view = layer.index, phase, held.keys, held.values, held.positions, held.state
        merged: Merged | None = policy.merger.absorb(Eviction(*view, kept, evicted, seen), layer.memory)
        if merged is not None:
            new = merged.slots, merged.keys, merged.values
            held.write(*new) if merged.bias is None else held.write(*new, merged.bias)
    if policy.schedule.rerotate:
        assert seen is not None, "checked when the policy is built"
        close_gaps(held, kept, seen)
    if group.on_evict is not None:
        group.on_evict(layer, ranking, kept)
    asked = [b if row else count for row, b, count in zip(over, budgets, layer.counts, strict=True)]
    slots = held.keep(kept, policy.schedule.spare, counts=asked if per_head is None else None)
    # The budgets, or what an allocator gave instead: the shapes show it without a synchronisation with the device.
    most = 0 if policy.allocator.per_head else slots.shape[-1]
    layer.counts = asked if most <= max(asked) else [most] * len(asked)
    if layer.ranking is not None:
        layer.ranking = ranking.at(slots, held.positions, held.packed)
    return kept


# --- budgets that wait for all layers ------------------------------------------------------------------------------
def _measure(pending: EvictionJob, allocator: StatisticAllocator) -> None:
    """Share the budget out as far as the allocator can with the layers measured so far.

    A cascading allocator brings all layers so far to their share at once; the others wait for the last layer.
    """
    group, layer, rows = pending.group, pending.layer, pending.step.now.evicts
    over_mean = group.budgets.exceeded(rows)
    group.budgets.measured(over_mean, allocator.measure(pending.step.observation, layer.store.state))
    last = layer.index == len(group.layers) - 1
    if allocator.cascades or last:
        group.budgets.share(over_mean)
        for ranked in group.layers[: layer.index + 1]:
            _compact_to_share(group, ranked, over_mean)
    if last:
        _settle_all(pending)


def _compact_to_share(group: PolicyGroup, layer: LayerState, rows: Sequence[bool]) -> None:
    """Bring a prompt that was scored already to this layer's share, in the chosen sequences."""
    assert layer.ranking is not None
    assert layer.policy.scorer is not None
    budgets = group.budgets.of(layer.index, rows)
    excess = [max(0, n - b) if row else 0 for row, n, b in zip(rows, layer.counts, budgets, strict=True)]
    if any(excess):
        ranking = layer.ranking.protecting(*protected_counts(layer.policy.scorer, budgets))
        _compact(group, layer, ranking, budgets, excess, "prompt")
        group.note_bytes(layer.index)


def _compact_jointly(pending: EvictionJob, allocator: JointAllocator) -> None:
    """Bring a prompt of which all layers are ranked to the slots it gets in each of them."""
    group, excess = pending.group, pending.excess
    budgets = [group.budgets.of(layer.index, pending.step.now.evicts) for layer in group.layers]
    slots = allocator.heads_of_all([layer.ranking for layer in group.layers if layer.ranking is not None], budgets)
    for layer, budget, heads in zip(group.layers, budgets, slots, strict=True):
        if max(excess) > 0:
            assert layer.ranking is not None
            heads = heads.to(layer.ranking.scores.device)
            _compact(group, layer, layer.ranking, budget, excess, "prompt", per_head=heads)
            group.note_bytes(layer.index)
    _settle_all(pending)


def _settle_all(pending: EvictionJob) -> None:
    """Every layer has its share: none is ranked any more."""
    for layer in pending.group.layers:
        layer.ranking, layer.unsettled = None, False
        pending.group.settle(layer.index, pending.step.now.prompt_done)


def _note_not_numbers(some: Sequence[EvictionJob], ranking: Ranking) -> None:
    """Sequences with a score that is no number (NaN): the call goes on for the others and ends in an error."""
    for row in ranking.broken(wait=some[0].step.now.phase != "decode"):  # decoding steps do not wait for a GPU
        for pending, rows in zip(some, _rows(some), strict=True):
            if row < rows:
                first = pending.step.rows.start or 0
                pending.group.not_numbers.setdefault(first + row, pending.layer.index)
                break
            row -= rows


def _rows(some: Sequence[EvictionJob]) -> list[int]:
    """Sequences of each layer."""
    return [len(pending.step.observation.positions) for pending in some]
