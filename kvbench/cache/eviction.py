"""Evictions: which are due, when they are carried out, and how.

Which: after a step, every layer with more tokens than its budget, if the schedule evicts (`EvictionJob`). When: at
once; at the end of the call, so that all layers that evict one token do it as one batch; after the last layer, if an
allocator divides the budget by statistics of all layers; after a pre-pass. How: score, rank, select, and then either
free the slot of one token (`select_one`) or compact the layer (`_compact`).

Shapes: n layers, B sequences, H_q query heads, H_kv KV heads, T slots of the longest layer, D head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvbench.cache.attention import LayerStep
from kvbench.cache.cascade import OnItsWay, can_cut, cut_to_shares, on_its_way
from kvbench.cache.group import PolicyGroup
from kvbench.cache.rerotate import close_gaps
from kvbench.cache.state import LayerState
from kvbench.policies.allocators.allocator import JointAllocator, StatisticAllocator
from kvbench.policies.allocators.threshold import Threshold
from kvbench.policies.constants import on_device
from kvbench.policies.mergers.merger import Eviction, OneEviction, Vectors
from kvbench.policies.observation import Memory, Observation, Phase, State
from kvbench.policies.policy import Policy
from kvbench.policies.pre_passes.pre_pass import TokenRating
from kvbench.policies.ranking import Ranking
from kvbench.policies.scorers.scorer import protected_counts
from kvbench.policies.stacked import batches, kind, stacked
from kvbench.policies.stores.paged import PagedStore
from kvbench.policies.stores.slot_store import SlotStore
from kvbench.policies.stores.slots import padded
from kvbench.policies.stores.store_list import StoreList

READ_AT_ONCE = ("cpu",)
"""Types of devices whose numbers the host reads without a wait."""


@dataclass(eq=False)
class EvictionJob:
    """A layer step after which sequences may hold more tokens than their budget.

    in_place: an evicted token leaves its slot to the next one, while decoding and in a prompt's blocks of one token. A
    prompt's first eviction compacts the layer, and so does every eviction after which it grows. excess: tokens per KV
    head to evict, for each sequence; 0 if it evicts nothing in this step.
    """

    group: PolicyGroup
    layer: LayerState
    step: LayerStep
    in_place: bool
    excess: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Measured:
    """A ranked layer of a prompt, and the allocator's statistic of it [B,k], which is on its way to the host."""

    job: EvictionJob
    allocator: StatisticAllocator
    statistic: OnItsWay


class Evictions:
    """The evictions of a cache that wait, in the order in which they became due."""

    def __init__(self) -> None:
        self._measured: list[Measured] = []  # shared out before the next layer appends its tokens
        self._shared: list[EvictionJob] = []  # of layers that later layers of the call read
        self._end_of_call: list[EvictionJob] = []
        self._pre_pass: list[EvictionJob] = []
        self._unsettled: list[EvictionJob] = []  # evicted, but their queries have not attended yet

    def add(self, group: PolicyGroup, layer: LayerState, step: LayerStep, shared: bool = False) -> None:
        """Evict after a layer has attended, or as soon as all inputs of the eviction are known.

        shared: other layers read this layer and have not attended yet.
        """
        now, policy, store = step.now, layer.policy, layer.store
        flat = isinstance(store, SlotStore) and store.starts is not None
        alike = policy.layers_alike and not (flat or policy.allocator.per_head)
        job = EvictionJob(group, layer, step, now.phase == "decode" or (alike and layer.compacted))
        if shared:
            self._shared.append(job)
            return
        if step.observe is not None:
            # In a prompt only if the layer has its final size: before, it may hold many more tokens than its budget.
            single = step.alone and now.aligned and step.queries.shape[2] == 1
            dense = isinstance(store, SlotStore | StoreList) and not flat
            if job.in_place and policy.layers_alike and single and dense:  # rows of one batch with other layers
                if step.params.latents is None:
                    self._end_of_call.append(job)
                    return
                evict([job])  # not later: latents expanded in all layers would need more memory than the cache
            elif policy.pre_pass is not None and now.phase != "decode":
                layer.unsettled = True
                without = replace(step.observation, queries=step.queries[:, :, :0].clone(), known={})
                self._pre_pass.append(replace(job, step=replace(step, observe=lambda _: without)))
            else:
                self._evict_or_rank(job)
        group.finish_step(layer, now)
        if policy.schedule.order == "attend_then_evict":
            group.settle(layer, now)
        else:
            self._unsettled.append(job)

    def share(self) -> None:
        """Divide the budgets among the layers that were measured since the last call, and evict.

        This is later than the measurement, so that a GPU works on the rest of the layer while the host waits for it.
        """
        due, self._measured = self._measured, []
        for measured in due:
            group = measured.job.group
            if group.error is None:
                try:
                    _share(measured)
                except Exception as error:
                    group.fail(error)

    def _evict_or_rank(self, job: EvictionJob) -> None:
        """Evict, or rank a prompt; if an allocator divides the budget by a statistic of the layers, `share` evicts."""
        measured = _evict_or_rank(job)
        if measured is not None:
            self._measured.append(measured)
            if job.layer.index == len(job.group.layers) - 1:
                self.share()

    def end_call(self) -> None:
        """Carry out the evictions that waited for the last layer."""
        due, self._shared = self._shared, []
        for job in due:
            try:
                self.add(job.group, job.layer, job.step)
            except Exception as error:
                job.group.fail(error)
        due, self._end_of_call = self._end_of_call, []
        evict(due)
        for job in due:
            job.group.finish_step(job.layer, job.step.now)
        due, self._unsettled = [*due, *self._unsettled], []
        for job in due:
            if job.group.error is None:
                job.group.settle(job.layer, job.step.now)

    def pre_pass_done(self) -> None:
        """Carry out the evictions that waited for a pre-pass."""
        due, self._pre_pass = self._pre_pass, []
        for job in due:
            if job.group.error is None:
                job.layer.unsettled = False
                try:
                    self._evict_or_rank(job)
                except Exception as error:
                    job.group.fail(error)
                job.group.settle(job.layer, job.step.now)


def _evict_or_rank(job: EvictionJob) -> Measured | None:
    """Evict, or rank a prompt and measure it if an allocator divides the budget among the layers."""
    layer, now, allocator = job.layer, job.step.now, job.group.policy.allocator
    if isinstance(allocator, Threshold):
        _evict_below(job, allocator)
        return None
    alone = now.phase == "decode" and not (isinstance(allocator, JointAllocator) and not allocator.per_head)
    if alone or not isinstance(allocator, StatisticAllocator | JointAllocator):
        evict([job])
        return None
    _observe(job)
    if any(now.evicts) and (now.phase != "decode" or max(_excess(job)) > 0):
        layer.ranking = layer.policy.rank(job.step.observation, layer.store.state)
        _note_not_numbers([job], layer.ranking)
        layer.unsettled = True
        if isinstance(allocator, StatisticAllocator):
            without = replace(job, step=replace(job.step, observe=None))  # frees the queries of the prompt
            return Measured(without, allocator, on_its_way(allocator.measure(job.step.observation, layer.store.state)))
        if layer.index == len(job.group.layers) - 1:
            _compact_jointly(job, allocator)
    return None


def _evict_below(job: EvictionJob, allocator: Threshold) -> None:
    """Evict the tokens below a threshold. Heads keep different numbers; a layer counts those of its longest head."""
    layer, now = job.layer, job.step.now
    _observe(job)
    if not any(now.evicts):
        return
    ranking = layer.policy.rank(job.step.observation, layer.store.state)
    _note_not_numbers([job], ranking)
    ranking = allocator.marked(ranking)
    counts, held = ranking.protected.sum(-1), ranking.occupied.sum(-1)
    excess = [n if evicts else 0 for n, evicts in zip((held - counts).amax(-1).tolist(), now.evicts, strict=True)]
    if max(excess) > 0:
        most = counts.amax(-1).tolist()
        _compact(job.group, layer, ranking, most, excess, now.phase, job.step.observation, per_head=counts)


def _excess(job: EvictionJob) -> list[int]:
    """Tokens per KV head to evict, for each sequence: all beyond its budget, `every` at once while decoding."""
    now, budgets, schedule = job.step.now, job.step.observation.sequences.budgets, job.group.policy.schedule
    least = schedule.every if now.phase == "decode" else 1
    beyond = [n - b if due else 0 for due, n, b in zip(now.evicts, job.layer.counts, budgets, strict=True)]
    return [n if n >= least else 0 for n in beyond]


def evict(due: Sequence[EvictionJob]) -> None:
    """Evict down to the budgets: equal layers as rows of one batch.

    An error ends the groups of its batch if they are `isolated`; else it is raised.
    """
    equal: dict[object, list[EvictionJob]] = {}
    for job in due:
        try:
            needs = job.group.policy.needs
            if needs.statistics or needs.memory:
                _observe(job)
            job.excess = _excess(job)
            if max(job.excess) > 0:
                single = len(due) > 1 and min(job.excess) == max(job.excess) == 1
                memory = tuple((name, x.shape[1:]) for name, x in job.layer.memory.items())
                key = (job.group.rule, memory, *kind(job.step.observation)) if single else job
                equal.setdefault(key, []).append(job)
        except Exception as error:
            job.group.fail(error)
    for jobs in equal.values():
        for indices in batches([job.step.observation for job in jobs], jobs[0].group.policy):
            some = [jobs[index] for index in indices]
            try:
                _evict_batch(some)
            except Exception as error:
                for job in some:
                    job.group.fail(error)


def _observe(job: EvictionJob) -> None:
    """Let the scorer update its running statistics and its memory."""
    policy, held, seen = job.group.policy, job.layer.store, job.step.observation
    if policy.needs.statistics or policy.needs.memory:
        state = held.state
        observe(policy, seen, state)
        held.state = state
        if policy.needs.memory:
            _store_memory([job], seen.memory)


def observe(policy: Policy, seen: Observation, state: State) -> None:
    """Update a policy's running statistics, in place."""
    assert policy.scorer is not None
    policy.scorer.observe(seen, state)
    if isinstance(policy.pre_pass, TokenRating):
        policy.pre_pass.observe(seen, state)


def _evict_batch(jobs: Sequence[EvictionJob]) -> None:
    """Score and evict in layers of one kind, as rows of one batch."""
    first, policy = jobs[0], jobs[0].group.policy
    for job in jobs:
        job.layer.counts = [count - n for count, n in zip(job.layer.counts, job.excess, strict=True)]
    stores = [job.layer.store for job in jobs]
    seen, states = stacked([job.step.observation for job in jobs]), [store.state for store in stores]
    state = {name: padded([one[name] for one in states]) for name in states[0]}
    ranking = policy.rank(seen, state)
    _note_not_numbers(jobs, ranking)
    if max(first.excess) > 1 or not first.in_place:
        assert len(jobs) == 1, "layers that evict several tokens are evicted one by one"
        sizes = zip(first.layer.counts, first.excess, seen.sequences.budgets, strict=True)
        targets = [count if n > 0 else budget for count, n, budget in sizes]
        kept = _compact(first.group, first.layer, ranking, targets, first.excess, seen.phase, seen)
        if policy.scorer is not None and policy.needs.kept:
            policy.scorer.selected(seen, kept)
        return
    over = tuple(n > 0 for job in jobs for n in job.excess)
    evicting = None if all(over) else on_device(over, ranking.scores.device)[:, None, None]
    memory: Memory = {}
    vectors: tuple[Vectors, ...] = ()
    if policy.merger.merges:
        memories = [job.layer.memory for job in jobs]
        memory = {name: torch.cat([one[name] for one in memories]) for name in memories[0]}
        vectors = Vectors([store.keys for store in stores]), Vectors([store.values for store in stores])
    index, packed = first.layer.index if len(jobs) == 1 else -1, all(store.slots.packed for store in stores)
    slots, merged = select_one(policy, ranking, seen, state, vectors, memory, evicting, index, packed)
    if memory:
        _store_memory(jobs, memory)
    rows = [len(job.excess) for job in jobs]
    if merged is not None:
        for store, *new in zip(stores, *(x.split(rows) for x in merged), strict=True):
            store.write(*new)
    for job, store, own in zip(jobs, stores, slots.split(rows), strict=True):
        store.release(own, None if evicting is None else [n > 0 for n in job.excess])


def select_one(
    policy: Policy,
    ranking: Ranking,
    seen: Observation,
    state: State,
    vectors: Sequence[Vectors],
    memory: Memory,
    evicting: Tensor | None,
    layer: int = -1,
    packed: bool = False,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
    """The slot [B,H_kv,1] of the token that every KV head evicts, and what a merger writes: slots, keys, values.

    evicting [B,1,1] bool: sequences that evict; None: all. vectors: keys and values for a merger, which updates
    `memory`. layer: its index, -1 for several.
    """
    slots, written = ranking.victim(), None
    if policy.merger.merges:
        keys, values = vectors
        eviction = OneEviction(layer, seen.phase, keys, values, seen.positions, state, slots, evicting, packed)
        merged = policy.merger.absorb_one(eviction, memory)
        if merged is not None:
            assert merged.bias is None, "mergers fit a bias only if several tokens are evicted"
            written = merged.slots, merged.keys, merged.values
    if policy.scorer is not None and policy.needs.kept:
        stays = torch.zeros_like(slots, dtype=torch.bool) if evicting is None else ~evicting.expand_as(slots)
        policy.scorer.selected(seen, ranking.occupied.scatter(-1, slots, stays))
    return slots, written


def _store_memory(jobs: Sequence[EvictionJob], memory: Memory) -> None:
    """Store the memory [n*B,...] of scorer or merger in its layers."""
    for name, x in memory.items():
        for job, own in zip(jobs, x.split([len(job.layer.counts) for job in jobs]), strict=True):
            job.layer.memory[name] = own.clone() if len(jobs) > 1 else own


def _compact(
    group: PolicyGroup,
    layer: LayerState,
    ranking: Ranking,
    targets: Sequence[int],
    excess: Sequence[int],
    phase: Phase,
    seen: Observation | None = None,
    per_head: Tensor | None = None,
) -> Tensor:
    """Evict down to `targets` tokens per KV head in the sequences with tokens in `excess`, and free the memory.

    per_head [B,H_kv]: number of slots of each head, if it is known. Returns the kept slots, bool [B,H_kv,T].
    """
    policy, held, device = layer.policy, layer.store, ranking.seen.device
    over = [n > 0 for n in excess]
    if per_head is None and policy.allocator.per_head and phase == "decode":
        per_head = ranking.occupied.sum(-1) - on_device(tuple(excess), device)[:, None]  # each keeps its share
    elif per_head is None:
        per_head = policy.allocator.heads(layer.index, ranking, targets)
    counts: Tensor | int | None = per_head
    if counts is None:
        equal = len(set(targets)) == 1
        counts = targets[0] if equal else on_device(tuple(targets), device)[:, None].expand(ranking.scores.shape[:2])
    kept = ranking.select(counts)
    if not all(over):
        kept |= ranking.occupied & ~on_device(tuple(over), device)[:, None, None]
    if policy.merger.merges:
        evicted = ranking.occupied & ~kept
        view = layer.index, phase, held.keys, held.values, held.positions, held.state
        merged = policy.merger.absorb(Eviction(*view, kept, evicted, seen), layer.memory)
        if merged is not None:
            new = merged.slots, merged.keys, merged.values
            held.write(*new) if merged.bias is None else held.write(*new, merged.bias)
    if policy.schedule.rerotate:
        assert seen is not None, "checked when the policy is built"
        close_gaps(held, kept, seen)
    if group.on_evict is not None:
        group.on_evict(layer, ranking, kept)
    paged = isinstance(held, PagedStore)
    if paged and per_head is not None:  # whole pages may hold fewer tokens than the target
        targets = per_head.amax(-1).tolist()
    expected = [n if evicts else count for evicts, n, count in zip(over, targets, layer.counts, strict=True)]
    slots = held.keep(kept, policy.schedule.spare, counts=expected if per_head is None else None)
    layer.compacted = True
    # An allocator may give other numbers than the targets; the shape has them without a synchronization.
    most = 0 if policy.allocator.per_head or paged else slots.shape[-1]
    layer.counts = expected if most <= max(expected) else [most] * len(expected)
    if layer.ranking is not None:
        layer.ranking = ranking.at(slots, held.positions, held.slots.packed)
    return kept


# --- budgets that depend on all layers -----------------------------------------------------------------------------
def _share(found: Measured) -> None:
    """Divide the budget among the layers measured so far: after each layer if the allocator cascades, else once."""
    job, group = found.job, found.job.group
    over_budget = group.budgets.exceeded(job.step.now.evicts)
    group.budgets.measured(over_budget, found.statistic())
    last = job.layer.index == len(group.layers) - 1
    if found.allocator.cascades or last:
        group.budgets.share(over_budget)
        ranked = group.layers[: job.layer.index + 1]
        if found.allocator.cascades and can_cut(group):
            cut_to_shares(group, ranked, over_budget, last)
        else:
            for layer in ranked:
                _compact_to_share(group, layer, over_budget)
    if last:
        _settle_all(job)


def _compact_to_share(group: PolicyGroup, layer: LayerState, rows: Sequence[bool]) -> None:
    """Evict from a layer that was ranked already, down to its share, in the selected sequences."""
    assert layer.ranking is not None
    assert layer.policy.scorer is not None
    budgets = group.budgets.of(layer.index, rows)
    excess = [max(0, n - b) if row else 0 for row, n, b in zip(rows, layer.counts, budgets, strict=True)]
    if any(excess):
        ranking = layer.ranking.protecting(*protected_counts(layer.policy.scorer, budgets))
        _compact(group, layer, ranking, budgets, excess, "prompt")
        group.note_bytes(layer.index)


def _compact_jointly(job: EvictionJob, allocator: JointAllocator) -> None:
    """Evict from all layers, down to the slots that an allocator chose for every layer and head together."""
    group, excess = job.group, _excess(job)
    budgets = [group.budgets.of(layer.index, job.step.now.evicts) for layer in group.layers]
    rankings = allocator.rank_of_all([layer.ranking for layer in group.layers if layer.ranking is not None])
    slots = allocator.heads_of_all(rankings, budgets)
    for layer, ranking, budget, heads in zip(group.layers, rankings, budgets, slots, strict=True):
        if max(excess) > 0:
            heads = heads.to(ranking.scores.device)
            _compact(group, layer, ranking, budget, excess, "prompt", per_head=heads)
            group.note_bytes(layer.index)
    _settle_all(job)


def _settle_all(job: EvictionJob) -> None:
    """Every layer has its share: drop the rankings and settle the stores."""
    for layer in job.group.layers:
        layer.ranking, layer.unsettled = None, False
        job.group.settle(layer, job.step.now)


def _note_not_numbers(jobs: Sequence[EvictionJob], ranking: Ranking) -> None:
    """Note sequences with a NaN score. The call continues for the others and ends with an error.

    The host does not wait for decoding steps on a GPU: their flags are read by the audit at the end.
    """
    later = jobs[0].step.now.phase == "decode" and ranking.scores.device.type not in READ_AT_ONCE
    if not later and not bool(ranking.scores.sum().isnan()):  # a tenth of the time of checking each score
        return
    flags = ranking.broken().split([len(job.layer.counts) for job in jobs])
    for job, own in zip(jobs, flags, strict=True):
        group, index = job.group, job.layer.index
        if later:
            group.nan_flags[index] = own | group.nan_flags[index] if index in group.nan_flags else own.clone()
        else:
            for row in own.nonzero().flatten().tolist():
                group.not_numbers.setdefault(row, index)
