"""Evictions: which are due, when they are carried out, and how.

Which: after a step every layer that holds more than its budget, where the schedule says so (`Pending`). When: at once;
at the end of the call, where every sequence evicts one token, so that all layers do it as one batch; once all layers
are measured, where an allocator shares the budget out by their statistics; once a pre-pass computed what scores need.
How: `evict`, for one layer as for many.

Shapes: n layers, B sequences, H_q query heads, H_kv KV heads, T slots of the fullest layer, D head dim.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvbench.cache.evict_batches import batches, kind
from kvbench.cache.group import PolicyGroup
from kvbench.cache.pending import Pending
from kvbench.cache.rerotate import close_gaps
from kvbench.cache.state import LayerState
from kvbench.cache.step import LayerStep
from kvbench.policies.allocators.allocator import JointAllocator, StatisticAllocator
from kvbench.policies.constants import on_device
from kvbench.policies.mergers.merger import Eviction, Merged, OneEviction, Vectors
from kvbench.policies.observation import Memory, Observation, Phase, State
from kvbench.policies.pre_passes.pre_pass import TokenRating
from kvbench.policies.ranking import Ranking
from kvbench.policies.scorers.scorer import protected_counts
from kvbench.policies.stacked import StackedObservation
from kvbench.policies.stores.slots import padded


class Evictions:
    """The evictions of a cache, in the order in which they are due."""

    def __init__(self) -> None:
        self._readers: list[tuple[PolicyGroup, LayerState, LayerStep]] = []
        self._end_of_call: list[Pending] = []
        self._pre_pass: list[Pending] = []

    def add(self, group: PolicyGroup, layer: LayerState, step: LayerStep) -> None:
        """A layer is through with a step: evict now, or once what its eviction waits for is known."""
        pending, now = Pending(group, layer, step), step.now
        if step.observed:
            policy = group.policy
            if pending.as_batch:
                due = [replace(pending, step=part) for part in step.parts or (step,)]
                if step.params.latents is None:
                    self._end_of_call += due
                    return
                for one in due:  # at once: what was expanded of all layers would take more memory than the cache
                    evict([one])
            elif policy.pre_pass is not None and now.phase != "decode":
                layer.unsettled = True
                self._pre_pass.append(replace(pending, step=_without_queries(step)))
            else:
                _evict_or_rank(pending)
            layer.limit_window(now)
        group.settle(layer.index, now.prompt_done)

    def add_later(self, group: PolicyGroup, layer: LayerState, step: LayerStep) -> None:
        """The same once other layers, which read what this one holds, are through too."""
        self._readers.append((group, layer, step))

    def end_call(self) -> None:
        """The last layer is through: carry out what waited for it."""
        read, self._readers = self._readers, []
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
        """What a pre-pass finds out of the prompt is known: score it, and evict where that is due."""
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


def _evict_or_rank(pending: Pending) -> None:
    """Evict, or rank a prompt where an allocator divides the budget once all layers are ranked."""
    allocator, now = pending.policy.allocator, pending.step.now
    if now.phase == "decode" or not isinstance(allocator, StatisticAllocator | JointAllocator):
        evict([pending])
        return
    _observe(pending)
    if any(now.evicts):
        _rank(pending)
        if isinstance(allocator, StatisticAllocator):
            _measure(pending, allocator)
        elif pending.layer.index == len(pending.group.layers) - 1:
            _compact_jointly(pending, allocator)


def evict(due: Sequence[Pending]) -> None:
    """Bring layers back to their budgets: those that are alike as rows of one batch, a lone one as a batch of one.

    An error ends the groups it came about in, where they are `isolated`; else it is raised.
    """
    alike: dict[object, list[Pending]] = {}
    for pending in due:
        try:
            _observe(pending)
            if max(pending.excess) <= 0:
                continue
            one_each = len(due) > 1 and min(pending.excess) == max(pending.excess) == 1
            alike.setdefault(kind(pending) if one_each else pending, []).append(pending)
        except Exception as error:
            pending.group.fail(error)
    for some in alike.values():
        for batch in batches(some):
            try:
                _evict_batch(batch)
            except Exception as error:
                for pending in batch:
                    pending.group.fail(error)


def _observe(pending: Pending) -> None:
    """Let the scorer take a step into its running statistics and its memory."""
    scorer, held = pending.policy.scorer, pending.store
    assert scorer is not None
    needs = pending.policy.needs
    if needs.statistics or needs.memory:
        state, seen = held.state, pending.step.observation
        scorer.observe(seen, state)
        if isinstance(pending.policy.pre_pass, TokenRating):
            pending.policy.pre_pass.observe(seen, state)
        held.remember(state)
        if needs.memory:
            _remember([pending], seen.memory)


def _evict_batch(some: Sequence[Pending]) -> None:
    """Score and evict in layers of one kind, all at once."""
    first, over = some[0], tuple(row for pending in some for row in pending.over)
    for pending in some:
        pending.group.count_evicted(pending.layer, pending.step.rows, pending.excess)
    seen = first.step.observation if len(some) == 1 else StackedObservation([p.step.observation for p in some])
    states = [pending.store.state for pending in some]
    state = {name: padded([own[name] for own in states]) for name in states[0]}
    ranking = first.policy.rank(seen, state)
    _note_not_numbers(some, ranking)
    if max(first.excess) == 1 and first.in_place:
        kept = _release(some, seen, state, ranking, over)
    else:
        assert len(some) == 1, "layers that evict several tokens do so one by one"
        kept = _compact(first.group, first.layer, ranking, seen.budgets, first.excess, first.phase, seen)
    scorer = first.policy.scorer
    if kept is not None and scorer is not None and first.policy.needs.kept:
        scorer.selected(seen, kept)


def _release(
    some: Sequence[Pending], seen: Observation, state: State, ranking: Ranking, over: tuple[bool, ...]
) -> Tensor | None:
    """Evict one token per KV head of the sequences that are `over`; the next token takes its slot.

    Returns the slots that stayed, bool [B,H_kv,T], where the scorer needs them.
    """
    policy, kept = some[0].policy, None
    victims = ranking.victim()
    going = None if all(over) else on_device(over, victims.device)[:, None, None]
    if policy.merger.merges:
        _merge(some, seen, state, victims, going)
    if policy.needs.kept:
        gone = on_device(over, victims.device)[:, None, None].expand_as(victims)
        kept = ranking.occupied.scatter(-1, victims, ~gone)
    for pending, slots in zip(some, victims.split(_rows(some)), strict=True):
        pending.store.release(slots, None if going is None else pending.over)
    return kept


def _merge(some: Sequence[Pending], seen: Observation, state: State, victims: Tensor, going: Tensor | None) -> None:
    """Let single tokens that go leave their trace in those that stay."""
    rows, policy = _rows(some), some[0].policy
    keys, values = (Vectors([getattr(pending.store, name) for pending in some]) for name in ("keys", "values"))
    packed = all(pending.store.packed for pending in some)
    index = some[0].layer.index if len(some) == 1 else -1
    eviction = OneEviction(index, seen.phase, keys, values, seen.positions, state, victims, going, packed)
    memory = _memory(some)
    merged = policy.merger.absorb_one(eviction, memory)
    _remember(some, memory)
    if merged is not None:
        assert merged.bias is None, "a bias is fitted where several tokens go"
        new = (x.split(rows) for x in (merged.slots, merged.keys, merged.values))
        for pending, *own in zip(some, *new, strict=True):
            pending.store.write(*own)


def _memory(some: Sequence[Pending]) -> Memory:
    """What is remembered of these sequences."""
    own = [{name: x[pending.step.rows] for name, x in pending.layer.memory.items()} for pending in some]
    return own[0] if len(own) == 1 else {name: torch.cat([part[name] for part in own]) for name in own[0]}


def _remember(some: Sequence[Pending], memory: Memory) -> None:
    """What is remembered of them from now on."""
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
    # What was asked for, or what an allocator gave instead: shapes tell it without a look at the device.
    most = 0 if policy.allocator.per_head else slots.shape[-1]
    layer.counts = asked if most <= max(asked) else [most] * len(asked)
    if layer.ranking is not None:
        layer.ranking = ranking.at(slots, held.positions, held.packed)
    return kept


# --- budgets that wait for all layers ------------------------------------------------------------------------------
def _rank(pending: Pending) -> None:
    """Score a layer's prompt, whose budget is not known yet."""
    layer = pending.layer
    layer.ranking = pending.policy.rank(pending.step.observation, layer.store.state)
    _note_not_numbers([pending], layer.ranking)
    layer.unsettled = True


def _measure(pending: Pending, allocator: StatisticAllocator) -> None:
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


def _compact_jointly(pending: Pending, allocator: JointAllocator) -> None:
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


def _settle_all(pending: Pending) -> None:
    """Every layer has its share: none is ranked any more."""
    for layer in pending.group.layers:
        layer.ranking, layer.unsettled = None, False
        pending.group.settle(layer.index, pending.step.now.prompt_done)


def _compact_to_share(group: PolicyGroup, layer: LayerState, rows: Sequence[bool]) -> None:
    """Bring a prompt that was scored already to this layer's share, in the chosen sequences."""
    scorer = layer.policy.scorer
    assert layer.ranking is not None
    assert scorer is not None
    budgets = group.budgets.of(layer.index, rows)
    excess = [max(0, n - b) if row else 0 for row, n, b in zip(rows, layer.counts, budgets, strict=True)]
    if any(excess):
        ranking = layer.ranking.protecting(*protected_counts(scorer, budgets))
        _compact(group, layer, ranking, budgets, excess, "prompt")
        group.note_bytes(layer.index)


def _without_queries(step: LayerStep) -> LayerStep:
    """A step that waits for long, without its queries."""
    seen = replace(step.observation, queries=step.queries[:, :, :0].clone())
    return replace(step, observe=lambda _: seen)


def _note_not_numbers(some: Sequence[Pending], ranking: Ranking) -> None:
    """Sequences with a score that is no number (NaN): the call goes on for the others and ends in an error."""
    for row in ranking.broken(wait=some[0].step.now.phase != "decode"):  # decoding steps do not wait for a GPU
        for pending, rows in zip(some, _rows(some), strict=True):
            if row < rows:
                first = pending.step.rows.start or 0
                pending.group.not_numbers.setdefault(first + row, pending.layer.index)
                break
            row -= rows


def _rows(some: Sequence[Pending]) -> list[int]:
    """Sequences of each layer."""
    return [pending.step.observation.positions.shape[0] for pending in some]
