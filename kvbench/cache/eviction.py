"""Evictions: which are due, when they are carried out, and how.

Which: after a step, every layer with more tokens than its budget, if the schedule evicts. When: at once; at the end of
the call, so that all layers that evict one token do it as one batch; after the last layer, if an allocator divides the
budget by statistics of all layers; after a pre-pass. How: score, rank, select, and then either overwrite the slot of
one token (`evict_one`) or compact the layer (`_compact`).

Shapes: n rows, each a layer of a sequence, H_kv KV heads, T slots of the longest row, D head dim.
"""

from collections.abc import Sequence as List
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.cache.cascade import OnItsWay, can_cut, cut_to_shares, on_its_way
from kvbench.cache.rerotate import close_gaps
from kvbench.cache.rows import PaddedRows, Rows, batches, key, note_nan
from kvbench.cache.sequence import Sequence
from kvbench.cache.shared import SharedReads
from kvbench.cache.step import Step
from kvbench.policies.allocators.allocator import JointAllocator, StatisticAllocator
from kvbench.policies.allocators.threshold import Threshold
from kvbench.policies.mergers.merger import Eviction, OneEviction
from kvbench.policies.observation import Observation
from kvbench.policies.policy import Policy
from kvbench.policies.pre_passes.pre_pass import TokenRating
from kvbench.policies.ranking import Ranking
from kvbench.policies.scorers.scorer import protected_counts
from kvbench.policies.stores.paged import PagedStore
from kvbench.policies.stores.slot_store import SlotStore


@dataclass(frozen=True)
class Measured:
    """A ranked layer of a prompt, and the allocator's statistic of it [1,k], which is on its way to the host."""

    step: Step
    allocator: StatisticAllocator
    statistic: OnItsWay


class Evictions:
    """The evictions of a cache that wait, in the order in which they became due."""

    def __init__(self, reads: SharedReads | None) -> None:
        self._reads = reads
        self._measured: list[Measured] = []  # shared out before the next layer appends its tokens
        self._shared: list[Step] = []  # of layers that later layers of the call read
        self._end_of_call: list[Step] = []
        self._pre_pass: list[Step] = []
        self._unsettled: list[Step] = []  # evicted, but their queries have not attended yet

    def add(self, step: Step) -> None:
        """Evict after a layer has attended, and its readers, or as soon as all inputs of the eviction are known."""
        layer, policy, store = step.layer, step.policy, step.layer.store
        flat = isinstance(store, SlotStore) and store.starts is not None
        alike = policy.layers_alike and not (flat or policy.allocator.per_head)
        step.in_place = step.phase == "decode" or (alike and layer.compacted)
        attends_first = policy.schedule.order == "attend_then_evict"
        if attends_first and self._reads is not None and not self._reads.all_read and self._reads.delays(step):
            self._shared.append(step)  # other layers read this layer and have not attended yet
            return
        if step.observed:
            # In a prompt only if the layer has its final size: before, it may hold many more tokens than its budget.
            single = step.alone and step.queries.shape[2] == 1
            dense = isinstance(store, SlotStore) and not flat
            if policy.pre_pass is not None and step.phase != "decode":
                layer.unsettled = True
                self._pre_pass.append(step.without_queries())
            elif step.in_place and policy.layers_alike and single and dense:  # rows of one batch with other layers
                if step.params.latents is None:
                    self._end_of_call.append(step)
                    return
                evict([step])  # not later: latents expanded in all layers would need more memory than the cache
            else:
                self._evict_or_rank(step)
        step.finish()
        if attends_first:
            step.settle()
        else:
            self._unsettled.append(step)

    def share(self) -> None:
        """Divide the budgets among the layers that were measured since the last call, and evict.

        This is later than the measurement, so that a GPU works on the rest of the layer while the host waits for it.
        """
        due, self._measured = self._measured, []
        for measured in due:
            sequence = measured.step.sequence
            if sequence.error is None:
                try:
                    _share(measured)
                except Exception as error:
                    sequence.fail(error)

    def _evict_or_rank(self, step: Step) -> None:
        """Evict, or rank a prompt; if an allocator divides the budget by a statistic of the layers, `share` evicts."""
        measured = _evict_or_rank(step)
        if measured is not None:
            self._measured.append(measured)
            if step.layer.index == len(step.sequence.layers) - 1:
                self.share()

    def end_call(self) -> None:
        """Carry out the evictions that waited for the last layer."""
        due, self._shared = self._shared, []
        for step in due:
            try:
                self.add(step)
            except Exception as error:
                step.sequence.fail(error)
        due, self._end_of_call = self._end_of_call, []
        evict(due)
        for step in due:
            step.finish()
        due, self._unsettled = [*due, *self._unsettled], []
        for step in due:
            if step.sequence.error is None:
                step.settle()

    def waiting(self, sequence: Sequence) -> list[Step]:
        """The steps of a sequence, one of each layer, whose evictions wait for a pre-pass."""
        return [step for step in self._pre_pass if step.sequence is sequence]

    def pre_pass_done(self) -> None:
        """Carry out the evictions that waited for a pre-pass."""
        due, self._pre_pass = self._pre_pass, []
        for step in due:
            if step.sequence.error is None:
                step.layer.unsettled = False
                try:
                    self._evict_or_rank(step)
                except Exception as error:
                    step.sequence.fail(error)
                step.settle()


def evict(due: List[Step]) -> None:
    """Evict down to the budgets: equal layers as rows of one batch.

    An error ends the sequences of its batch if they are `isolated`; else it is raised.
    """
    equal: dict[object, list[Step]] = {}
    for step in due:
        try:
            _observe(step)
            step.excess = _excess(step)
            if step.excess > 0:
                alike = len(due) > 1 and step.excess == 1
                equal.setdefault(key(step) if alike else step, []).append(step)
        except Exception as error:
            step.sequence.fail(error)
    for alike_steps in equal.values():
        for some in batches(alike_steps):
            try:
                if some[0].excess > 1 or not some[0].in_place:
                    assert len(some) == 1, "layers that evict several tokens are evicted one by one"
                    _evict_several(some[0])
                else:
                    evict_one(PaddedRows(some))
            except Exception as error:
                for step in some:
                    step.sequence.fail(error)


def _excess(step: Step) -> int:
    """Tokens per KV head to evict: all beyond the budget, `every` at once while decoding."""
    least = step.policy.schedule.every if step.phase == "decode" else 1
    beyond = step.layer.count - step.budget if step.span.evicts else 0
    return beyond if beyond >= least else 0


def _observe(step: Step) -> None:
    """Let the scorer update its running statistics and its memory."""
    policy, held = step.policy, step.layer.store
    if policy.needs.statistics or policy.needs.memory:
        seen, state = step.observation, held.state
        observe(policy, seen, state)
        held.state = state
        if policy.needs.memory:
            step.layer.memory |= seen.memory


def observe(policy: Policy, seen: Observation, state: dict[str, Tensor]) -> None:
    """Update a policy's running statistics, in place."""
    assert policy.scorer is not None
    policy.scorer.observe(seen, state)
    if isinstance(policy.pre_pass, TokenRating):
        policy.pre_pass.observe(seen, state)


# --- one token of every row ------------------------------------------------------------------------------------------
def evict_one(rows: Rows) -> None:
    """Evict one token per KV head from every row that is over its budget; the next token overwrites its slot."""
    policy, seen, state = rows.policy, rows.observation, rows.state
    ranking = policy.rank(seen, state)
    rows.note_nan(ranking)
    slots, evicting = ranking.victim(), rows.evicting
    if policy.merger.merges:
        memory = rows.memory
        going = None if evicting is None else evicting[:, None, None]
        eviction = OneEviction(rows.layer, seen.phase, *rows.vectors, seen.positions, state, slots, going, rows.packed)
        merged = policy.merger.absorb_one(eviction, memory)
        rows.store_memory(memory)
        if merged is not None:
            assert merged.bias is None, "mergers fit a bias only if several tokens are evicted"
            rows.write(merged.slots, merged.keys, merged.values)
    if policy.scorer is not None and policy.needs.kept:
        stays = torch.zeros_like(slots, dtype=torch.bool)
        if evicting is not None:
            stays |= ~evicting[:, None, None]
        policy.scorer.selected(seen, ranking.occupied.scatter(-1, slots, stays))
    rows.release(slots)


# --- several tokens of a layer ---------------------------------------------------------------------------------------
def _evict_several(step: Step) -> None:
    """Score and evict down to the budget of a layer."""
    seen, layer, policy = step.observation, step.layer, step.policy
    layer.count -= step.excess
    ranking = policy.rank(seen, layer.store.state)
    note_nan([step], ranking)
    kept = _compact(step, ranking, layer.count, step.excess, seen)
    if policy.scorer is not None and policy.needs.kept:
        policy.scorer.selected(seen, kept)


def _compact(
    step: Step,
    ranking: Ranking,
    target: int,
    excess: int,
    seen: Observation | None = None,
    per_head: Tensor | None = None,
) -> Tensor:
    """Evict `excess` tokens per KV head of the step's layer, down to `target`, and free the memory.

    per_head [1,H_kv]: number of slots of each head, if it is known. Returns the kept slots, bool [1,H_kv,T].
    """
    layer, policy, held = step.layer, step.policy, step.layer.store
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
    if policy.schedule.rerotate:
        assert seen is not None, "checked when the policy is built"
        close_gaps(held, kept, seen)
    if step.sequence.on_evict is not None:
        step.sequence.on_evict(layer, ranking, kept)
    paged = isinstance(held, PagedStore)
    if paged and per_head is not None:  # whole pages may hold fewer tokens than the target
        target = int(per_head.max())
    slots = held.keep(kept, policy.schedule.spare, target if per_head is None else None)
    layer.compacted = True
    # An allocator may give other numbers than the target; the shape has them without a synchronization.
    layer.count = target if policy.allocator.per_head or paged else max(target, slots.shape[-1])
    if layer.ranking is not None:
        layer.ranking = ranking.at(slots, held.positions, held.slots.packed)
    return kept


# --- budgets that depend on all layers -------------------------------------------------------------------------------
def _evict_or_rank(step: Step) -> Measured | None:
    """Evict, or rank a prompt and measure it if an allocator divides the budget among the layers."""
    layer, allocator = step.layer, step.policy.allocator
    if isinstance(allocator, Threshold):
        _evict_below(step, allocator)
        return None
    alone = step.phase == "decode" and not (isinstance(allocator, JointAllocator) and not allocator.per_head)
    if alone or not isinstance(allocator, StatisticAllocator | JointAllocator):
        evict([step])
        return None
    _observe(step)
    if step.span.evicts and (step.phase != "decode" or _excess(step) > 0):
        layer.ranking = step.policy.rank(step.observation, layer.store.state)
        note_nan([step], layer.ranking)
        layer.unsettled = True
        if isinstance(allocator, StatisticAllocator):
            statistic = on_its_way(allocator.measure(step.observation, layer.store.state))
            return Measured(step.of_layer(layer), allocator, statistic)  # without the queries of the prompt
        if layer.index == len(step.sequence.layers) - 1:
            _compact_jointly(step, allocator)
    return None


def _evict_below(step: Step, allocator: Threshold) -> None:
    """Evict the tokens below a threshold. Heads keep different numbers; a layer counts those of its longest head."""
    _observe(step)
    if not step.span.evicts:
        return
    ranking = step.policy.rank(step.observation, step.layer.store.state)
    note_nan([step], ranking)
    ranking = allocator.marked(ranking)
    counts, held = ranking.protected.sum(-1), ranking.occupied.sum(-1)
    excess = int((held - counts).max())
    if excess > 0:
        _compact(step, ranking, int(counts.max()), excess, step.observation, per_head=counts)


def _share(found: Measured) -> None:
    """Divide the budget among the layers measured so far: after each layer if the allocator cascades, else once."""
    step, sequence = found.step, found.step.sequence
    budgets, over_budget = sequence.budgets, sequence.budgets.exceeded
    if over_budget:
        budgets.measured(found.statistic()[0].tolist())
    last = step.layer.index == len(sequence.layers) - 1
    if over_budget and (found.allocator.cascades or last):
        budgets.share()
        ranked = sequence.layers[: step.layer.index + 1]
        if found.allocator.cascades and can_cut(sequence):
            cut_to_shares(sequence, ranked, last)
        else:
            for layer in ranked:
                _compact_to_share(step.of_layer(layer))
    if last:
        _settle_all(step)


def _compact_to_share(step: Step) -> None:
    """Evict from a layer that was ranked already, down to its share."""
    layer, budget = step.layer, step.sequence.budgets.shares[step.layer.index]
    assert layer.ranking is not None
    assert step.policy.scorer is not None
    excess = layer.count - budget
    if excess > 0:
        ranking = layer.ranking.protecting(*protected_counts(step.policy.scorer, [budget]))
        _compact(step, ranking, budget, excess)
        step.sequence.note_bytes(layer.index)


def _compact_jointly(step: Step, allocator: JointAllocator) -> None:
    """Evict from all layers, down to the slots that an allocator chose for every layer and head together."""
    sequence, excess = step.sequence, _excess(step)
    budgets = sequence.budgets.shares
    rankings = allocator.rank_of_all([layer.ranking for layer in sequence.layers if layer.ranking is not None])
    slots = allocator.heads_of_all(rankings, [[budget] for budget in budgets])
    for layer, ranking, budget, heads in zip(sequence.layers, rankings, budgets, slots, strict=True):
        if allocator.sets_budget:  # the layer counts the tokens of its longest head
            budget = int(heads.max())
            excess = layer.count - budget
        if excess > 0:
            _compact(step.of_layer(layer), ranking, budget, excess, per_head=heads.to(ranking.scores.device))
            sequence.note_bytes(layer.index)
    _settle_all(step)


def _settle_all(step: Step) -> None:
    """Every layer has its share: drop the rankings and settle the stores."""
    for layer in step.sequence.layers:
        layer.ranking, layer.unsettled = None, False
        step.of_layer(layer).settle()
