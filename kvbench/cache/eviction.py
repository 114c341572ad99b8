"""Evictions: which are due, when they are carried out, and how.

Which: after a step, every layer with more tokens than its budget, if the schedule evicts. When: at once, or when an
extra says so. How: score, rank, select, and compact the layer. Sequences that evict one token after each decoded one
are in a table, whose groups overwrite the slot of the evicted token (`kvbench.cache.group`).

Shapes: H_kv KV heads, T slots, D head dim.
"""

from collections.abc import Sequence as List

from torch import Tensor

from kvbench.cache.extra import Extra, When
from kvbench.cache.rerotate import close_gaps
from kvbench.cache.step import Step
from kvbench.policies.mergers.merger import Eviction
from kvbench.policies.observation import Observation
from kvbench.policies.ranking import Ranking
from kvbench.policies.stores.paged import PagedStore
from kvbench.policies.stores.slot_store import SlotStore
from kvbench.policies.stores.store import LayerStore

READ_AT_ONCE = ("cpu",)
"""Types of devices whose numbers the host reads without a wait."""


class Evictions:
    """The evictions of a cache that wait, in the order in which they became due."""

    def __init__(self, extras: List[Extra]) -> None:
        self._extras = extras
        self._delayed: list[Step] = []  # by an extra, until the end of the call
        self._unsettled: list[Step] = []  # evicted, but their queries have not attended yet

    def add(self, step: Step) -> None:
        """Evict after a layer has attended, or as soon as all inputs of the eviction are known."""
        when = self._when(step)
        if when == "end of call":
            self._delayed.append(step)
            return
        if when == "now" and step.observed:
            evict(step)
        if step.policy.schedule.order == "attend_then_evict":
            step.settle()
        else:
            self._unsettled.append(step)

    def _when(self, step: Step) -> When:
        """When the eviction of a step is due: the first answer of an extra that is not "now"."""
        return next((when for extra in self._extras if (when := extra.before_eviction(step)) != "now"), "now")

    def end_call(self) -> None:
        """Carry out the evictions that waited for the last layer."""
        due, self._delayed = self._delayed, []
        for step in due:
            try:
                self.add(step)
            except Exception as error:
                step.sequence.fail(error)
        due, self._unsettled = self._unsettled, []
        for step in due:
            if step.sequence.error is None:
                step.settle()

    def resume(self, due: List[Step]) -> None:
        """Carry out evictions that an extra held back."""
        for step in due:
            if step.sequence.error is None:
                try:
                    if self._when(step) == "now":
                        evict(step)
                except Exception as error:
                    step.sequence.fail(error)
                step.settle()


def evict(step: Step) -> None:
    """Evict down to the budget of a layer."""
    observe(step)
    note_decision(step)
    excess = excess_of(step)
    if excess == 0:
        return
    seen, layer, policy = step.observation, step.layer, step.policy
    layer.count -= excess
    ranking = policy.rank(seen, layer.store.state)
    note_nan(step, ranking)
    kept = compact(step, ranking, layer.count, excess, seen)
    if kept is not None and policy.scorer is not None and policy.needs.kept:
        policy.scorer.selected(seen, kept)


def note_decision(step: Step) -> None:
    """Note for the audit that the policy decides now which tokens to evict, if the schedule lets it."""
    if step.span.evicts:
        step.layer.decided = step.span.end


def excess_of(step: Step) -> int:
    """Tokens per KV head to evict: all beyond the budget, `every` at once while decoding."""
    least = step.policy.schedule.every if step.phase == "decode" else 1
    beyond = step.layer.count - step.budget if step.span.evicts else 0
    return beyond if beyond >= least else 0


def observe(step: Step) -> None:
    """Let the scorer update its running statistics and its memory."""
    policy, held = step.policy, step.layer.store
    if policy.needs.statistics or policy.needs.memory:
        seen, state = step.observation, held.state
        policy.observe(seen, state)
        held.state = state
        if policy.needs.memory:
            step.layer.memory |= seen.memory


def note_nan(step: Step, ranking: Ranking) -> None:
    """Note a NaN score. The call continues for the other sequences and ends with an error.

    The host does not wait for a GPU here: flags of a prompt are read at the end of its call, others by the audit.
    """
    later = ranking.scores.device.type not in READ_AT_ONCE
    if not later and not bool(ranking.scores.sum().isnan()):  # a tenth of the time of checking each score
        return
    sequence, index, flag = step.sequence, step.layer.index, ranking.broken
    if later:
        flags = sequence.nan_flags
        own = flag if step.phase == "prompt" else flag.clone()  # of a block, it is written to
        flags[index] = flag | flags[index] if index in flags else own
    elif bool(flag) and sequence.nan_layer is None:
        sequence.nan_layer = index


def compact(
    step: Step,
    ranking: Ranking,
    target: int,
    excess: int,
    seen: Observation | None = None,
    per_head: Tensor | None = None,
) -> Tensor | None:
    """Evict `excess` tokens per KV head of the step's layer, down to `target`, and free the memory.

    per_head [1,H_kv]: number of slots of each head, if it is known. Returns the kept slots, bool [1,H_kv,T], if the
    scorer uses them.
    """
    layer, policy, held = step.layer, step.policy, step.layer.store
    if per_head is None and policy.allocator.per_head and step.phase == "decode":
        per_head = ranking.occupied.sum(-1) - excess  # each keeps its share
    elif per_head is None:
        per_head = policy.allocator.heads(layer.index, ranking, [target])
    if per_head is None and _by_order(step, ranking) and isinstance(held, SlotStore):
        held.keep_slots(ranking.slots(target), policy.schedule.spare)
        layer.compacted, layer.count = True, target
        return None
    kept = ranking.select(target if per_head is None else per_head)
    known = _merge(step, ranking, kept, None if per_head is not None else target, seen)
    if policy.schedule.rerotate and not (step.phase == "decode" and excess == 1):
        assert seen is not None, "checked when the policy is built"
        close_gaps(held, kept, seen)
    if step.sequence.on_evict is not None:
        step.sequence.on_evict(layer, ranking, kept)
    paged = isinstance(held, PagedStore)
    if paged and per_head is not None:  # whole pages may hold fewer tokens than the target
        target = int(per_head.max())
    if known is not None and isinstance(held, SlotStore):
        slots = held.keep_slots(known, policy.schedule.spare)
    else:
        slots = held.keep(kept, policy.schedule.spare, target if per_head is None else None)
    layer.compacted = True
    # An allocator may give other numbers than the target; the shape has them without a synchronization.
    layer.count = target if policy.allocator.per_head or paged else max(target, slots.shape[-1])
    if layer.ranking is not None:
        layer.ranking = ranking.at(slots, held.positions, held.slots.packed)
    return kept


def _merge(step: Step, ranking: Ranking, kept: Tensor, target: int | None, seen: Observation | None) -> Tensor | None:
    """Merge evicted tokens into kept ones. Returns the kept slots in order of position, [1,H_kv,target], if known."""
    layer, policy, held = step.layer, step.policy, step.layer.store
    if not policy.merger.merges:
        return None
    sizes, slots = None, ranking.scores.shape[-1]
    if target is not None and ranking.ascending and ranking.packed:
        sizes = target, slots - target
    view = layer.index, step.phase, held.keys, held.values, held.positions, held.state
    eviction = Eviction(*view, kept, ranking.occupied & ~kept, seen, sizes)
    merged = policy.merger.absorb(eviction, layer.memory)
    if merged is not None:
        new = merged.slots, merged.keys, merged.values
        held.write(*new) if merged.bias is None else held.write(*new, merged.bias)
    return eviction.in_order[0].slots if sizes is not None and _plain(held) else None


def _plain(held: LayerStore) -> bool:
    """Whether a store keeps slots of equal number in every head, as they are."""
    return isinstance(held, SlotStore) and type(held).keep is SlotStore.keep and not held.ragged


def _by_order(step: Step, ranking: Ranking) -> bool:
    """Whether a prompt's slots are taken from the order of preference, which budgets of one policy share.

    On a CPU, a threshold on the scores is faster; and what else an eviction does needs a mask of the kept slots.
    """
    policy = step.policy
    if step.phase != "prompt" or ranking.scores.is_cpu or step.layer.ranking is not None:
        return False
    masked = policy.merger.merges or policy.schedule.rerotate or policy.needs.kept or policy.allocator.per_head
    plain = _plain(step.layer.store) and ranking.ascending and ranking.packed
    return plain and not masked and step.sequence.on_evict is None
