"""Evictions: which are due, when they are carried out, and how.

Which: after a step, every layer with more tokens than its budget, if the schedule evicts. When: together with other
layers and sequences, as rows of one batch, as many as fit the workspace of the backend; at once where a part of the
policy is that of a single layer; or when an extra says so. How: score, rank, select, and compact
(`kvbench.cache.compaction`). Sequences that evict one token after each decoded one are in a table, whose groups
overwrite the slot of the evicted token (`kvbench.cache.group`).

Shapes: n layers that evict together, H_kv KV heads, T slots, D head dim.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvbench.cache import attend as backends
from kvbench.cache.compaction import cascades, compact, takes_rows
from kvbench.cache.extra import Extra, When
from kvbench.cache.layer import Layer
from kvbench.cache.rows import LazyObservation, Rows, evict
from kvbench.cache.step import Step
from kvbench.kernels.references import FEW_QUERIES
from kvbench.policies.allocators.allocator import StatisticAllocator
from kvbench.policies.observation import Observation, StepCache
from kvbench.policies.ranking import Ranking
from kvbench.policies.selections.fair import Fair
from kvbench.policies.stores.slot_store import SlotStore
from kvbench.policies.stores.slots import copy_each, rows_of

SUCH = 4
"""Tensors as large as the statistics, or the attention rows, that an allocator or a merger computes with."""


class Evictions:
    """The evictions of a cache that wait, in the order in which they became due."""

    def __init__(self, extras: Sequence[Extra]) -> None:
        self._extras = extras
        self._waiting: list[Step] = []  # until other layers can evict with them
        self._workspace: dict[tuple[int, int | None], int] = {}  # their bytes by layer and step; None: of one prompt
        self._delayed: list[Step] = []  # by an extra, until the end of the call

    def add(self, step: Step, attended: bool = True) -> bool:
        """Evict, or as soon as all inputs of the eviction are known. attended: the step ends with its eviction.

        Returns whether the eviction was carried out now.
        """
        when = self._when(step)
        if when == "end of call":
            self._delayed.append(step)
            return False
        if when == "now" and joins(step):
            _prepare(step)
            self._waiting.append(step)
            key = step.layer.index, None if step.known is not None else id(step)
            self._workspace[key] = max(self._workspace.get(key, 0), workspace(step))
            return False
        if when == "now" and step.observed:
            evict(self._rows([step], {}))
        if attended:
            step.settle()
        return True

    def _when(self, step: Step) -> When:
        """When the eviction of a step is due: the first answer of an extra that is not "now"."""
        return next((when for extra in self._extras if (when := extra.before_eviction(step)) != "now"), "now")

    def _rows(self, steps: Sequence[Step], known: StepCache) -> Rows:
        """The eviction of some steps: that of an extra, or of all other policies."""
        found = (extra.rows(steps, known) for extra in self._extras)
        return next((rows for rows in found if rows is not None), None) or StepRows(steps, known)

    def _advance(self) -> None:
        """Some evictions have ended."""
        for extra in self._extras:
            extra.between_layers()

    def end_layer(self) -> None:
        """Carry out the evictions that wait for other layers if one layer more would not fit the workspace."""
        if not self._waiting:
            return
        layers = len({layer for layer, _ in self._workspace})
        most = backends.backend_of(self._waiting[0].values).workspace
        if sum(self._workspace.values()) * (layers + 1) > layers * most:
            self._evict_waiting()

    def _evict_waiting(self) -> None:
        """Evict from all layers that wait, as few batches."""
        due, self._waiting, self._workspace = self._waiting, [], {}
        known: defaultdict[object, StepCache] = defaultdict(dict)
        for steps in batches(due):
            first = steps[0]
            call = first.policy.granularity, first.span, *(step.layer.index for step in steps)
            try:
                evict(self._rows(steps, {} if first.known is None else known[call]))
            except Exception as error:
                for sequence in {id(step.sequence): step.sequence for step in steps}.values():
                    sequence.fail(error)
        for step in due:
            if step.sequence.error is None:
                step.settle()

    def end_call(self) -> None:
        """Carry out the evictions that waited for the last layer."""
        due, self._delayed = self._delayed, []
        for step in due:
            try:
                self.add(step)
            except Exception as error:
                step.sequence.fail(error)
        self._evict_waiting()
        self._advance()

    def resume(self, due: Sequence[Step]) -> None:
        """Carry out evictions that an extra held back."""
        for step in due:
            if step.sequence.error is None:
                try:
                    if self._when(step) == "now":
                        evict(self._rows([step], {}))
                except Exception as error:
                    step.sequence.fail(error)
                step.settle()
        self._advance()


# --- layers that evict together ------------------------------------------------------------------------------------
def joins(step: Step) -> bool:
    """Whether a step may evict as a row of a batch, with other layers: nothing in it is that of a single layer."""
    policy, needs, call = step.policy, step.policy.needs, step.params
    if not (step.observed and step.alone) or policy.pre_pass is not None:
        return False
    if isinstance(policy.selection, Fair):  # it reads the queries of every part of a prompt
        return False
    if needs.layer or needs.hidden or policy.schedule.order != "attend_then_evict":
        return False
    if cascades(policy) and step.phase != "decode":  # a layer makes room for the next ones
        return False
    if policy.scorer is not None and policy.scorer.needs.memory:
        return False
    plain = takes_rows(step) and step.layer.store.slots.bias is None
    return plain and call.sinks is None and call.latents is None


def _prepare(step: Step) -> None:
    """What a step needs before it waits: its budget is valid, and the sums over its queries, which are not kept."""
    excess_of(step)
    if step.queries.shape[2] > FEW_QUERIES:
        if step.policy.needs.sums is not None:
            getattr(step.observation, step.policy.needs.sums)()
        if step.window is None:
            step.drop_queries()


def workspace(step: Step) -> int:
    """Bytes of the queries, keys, values and attention rows of a step; keys and values also as rows of a batch.

    A layer that is only measured has its keys and values anyway.
    """
    held, policy, rows = step.layer.store, step.policy, step.queries.shape[2]
    if step.window is not None:
        rows = step.window[0].shape[2]
    attention = 4 * step.queries.shape[1] * rows * held.positions.shape[2] if step.observed else 0
    attention *= SUCH if policy.merger.needs.window else 1
    scored = step.window is not None or policy.needs.keys or policy.value is not None
    if step.observed and step.phase != "decode" and isinstance(policy.allocator, StatisticAllocator) and not scored:
        return step.queries.nbytes + attention + SUCH * sum(x.nbytes for x in held.state.values())
    return step.queries.nbytes + 2 * (held.keys.nbytes + held.values.nbytes) + attention


def batches(steps: Sequence[Step]) -> Iterable[list[Step]]:
    """Steps of one rule and of equal shapes, which evict as rows of one batch; those of one prompt by sequence.

    Rows are padded to the largest budget, of which each has at least half.
    """
    alike: dict[object, list[Step]] = {}
    for step in steps:
        own = step.sequence.rule if step.known is None else step.sequence
        window = None if step.window is None else step.window[0].shape
        counts, form = (excess_of(step) > 0, step.spare, step.prompt_done), form_of(step.layer)
        key = own, step.policy.schedule, step.span, step.fresh, counts, form, window, step.params[:3]
        alike.setdefault(key, []).append(step)
    for some in alike.values():
        yield from similar(some, [step.budget for step in some])


def form_of(layer: Layer) -> object:
    """Layers of equal forms have tensors that can be rows of one."""
    held = layer.store
    assert isinstance(held, SlotStore)
    tensors = tuple((name, x.shape[1:2] + x.shape[3:], x.dtype, x.device) for name, x in held.memory.items())
    memory = tuple((name, x.shape) for name, x in layer.memory.items())
    return tensors, memory, layer.count, held.used, held.slots


def similar(steps: Sequence[Step], budgets: Sequence[int], most: int | None = None) -> Iterable[list[Step]]:
    """Steps whose budgets are at least half of the largest one, with at most `most` bytes of workspace."""
    found: list[Step] = []
    largest = held = 0
    for budget, step in sorted(zip(budgets, steps, strict=True), key=lambda each: -each[0]):
        size = 0 if most is None else workspace(step)
        if found and (2 * budget < largest or (most is not None and held + size > most)):
            yield found
            found, held = [], 0
        largest = largest if found else budget
        found.append(step)
        held += size
    if found:
        yield found


def joined(steps: Sequence[Step], known: StepCache) -> Observation:
    """One observation of steps of equal shapes, whose sequences [n] are the steps; their windows become views of it.

    known: what was computed for another policy of the same prompt and layers.
    """
    first, count = steps[0], len(steps)
    seen, names = first.observation, set.intersection(*(set(step.observation.known) for step in steps))
    for name in names - set(known):
        if all(isinstance(step.observation.known[name], Tensor) for step in steps):
            known[name] = torch.cat([step.observation.known[name] for step in steps])
    contents = known if first.fresh and first.known is not None else StepCache()
    for name in ("keys", "values", "positions"):
        if name not in contents:
            parts = [getattr(step.layer.store, name) for step in steps]
            contents[name] = parts[0].expand(count, -1, -1) if name == "positions" and first.fresh else rows_of(parts)
    window = None
    if seen.window is not None:
        name = "window", seen.window.queries.shape[2]
        if name not in contents:
            contents[name] = torch.cat([step.window[0] for step in steps if step.window is not None])
        places = torch.cat([step.window[1] for step in steps if step.window is not None])
        see_own = all(step.observation.window.see_own for step in steps if step.observation.window is not None)
        window = seen.window._replace(queries=contents[name], positions=places, see_own=see_own)
        kept: list[tuple[Tensor, Tensor]] = []
        for step, *own in zip(steps, contents[name].split(1), places.split(1), strict=True):
            if contents is known:  # other policies of the prompt have the same tensors
                step.layer.recent.bind(*own)
            else:
                kept += step.layer.recent.keep(*own)
        copy_each(kept)
    numbers: dict[str, Any] = {
        name: tuple(step.sequence.budgets.numbers[name] for step in steps) for name in first.policy.needs.reads
    }
    few = first.queries.shape[2] <= FEW_QUERIES  # more are in no score, apart from the window
    queries = torch.cat([step.queries if few else step.queries[:, :, :0] for step in steps])
    return LazyObservation(
        contents.__getitem__,
        queries=queries,
        query_positions=first.positions.expand(count, -1),
        positions=contents["positions"],
        seen=seen.seen.expand(count),
        phase=seen.phase,
        params=seen.params,
        window=window,
        slots=seen.slots,
        sequences=seen.sequences._replace(
            opens=seen.sequences.opens * count,
            budgets=tuple(budget for step in steps for budget in step.observation.sequences.budgets),
            **numbers,
        ),
        shared=seen.shared,
        known=known,
    )


# --- one eviction ----------------------------------------------------------------------------------------------------
class StepRows(Rows):
    """The steps of a layer, or of several of equal shapes, of prompts, blocks and tokens that are in no table.

    known: what was computed for another policy of the same prompt and layers. frees: whether `free` frees slots.
    """

    frees = True

    def __init__(self, steps: Sequence[Step], known: StepCache) -> None:
        first = steps[0]
        self._steps, self.policy, self._excess = steps, first.policy, excess_of(first)
        self.observation = first.observation if len(steps) == 1 else joined(steps, known)
        states = [step.layer.store.state for step in steps] if self.policy.needs.statistics else []
        self.state = {name: rows_of([own[name] for own in states]) for name in self.policy.needs.statistics}

    def store(self) -> None:
        stores = [step.layer.store for step in self._steps]
        if len(stores) == 1:
            stores[0].state = self.state
        elif not (self.frees and self._excess > 0):  # else, the statistics of kept tokens are written
            own = [store.state for store in stores]
            for name, x in self.state.items():
                copy_each([(state[name], part) for state, part in zip(own, x.split(1), strict=True)])
            for store, state in zip(stores, own, strict=True):
                store.state = state
        if self.policy.needs.memory:
            self._steps[0].layer.memory |= self.observation.memory

    def is_due(self) -> bool:
        for step in self._steps:
            note_decision(step)
        return self._excess > 0

    def note_nan(self, ranking: Ranking) -> None:
        """The host does not wait for a GPU: flags of a prompt are read at the end of its call, others by the audit."""
        later = not backends.backend_of(ranking.scores).reads_at_once
        if not later and not bool(ranking.scores.sum().isnan()):  # a tenth of the time of checking each score
            return
        for step, flag in zip(self._steps, ranking.broken.split(1), strict=True):
            sequence, index = step.sequence, step.layer.index
            if later:
                flags = sequence.nan_flags
                if index in flags:
                    flags[index] |= flag
                else:
                    flags[index] = flag.clone()
            elif bool(flag) and sequence.nan_layer is None:
                sequence.nan_layer = index

    def free(self, ranking: Ranking) -> None:
        targets = [step.layer.count - excess_of(step) for step in self._steps]
        compact(self._steps, ranking, targets, self.observation, state=self.state)


def note_decision(step: Step) -> None:
    """Note for the audit that the policy decides now which tokens to evict, if the schedule lets it."""
    if step.span.evicts:
        step.layer.decided = step.span.end


def excess_of(step: Step) -> int:
    """Tokens per KV head to evict: all beyond the budget, `every` at once while decoding."""
    least = step.policy.schedule.every if step.phase == "decode" else 1
    beyond = step.layer.count - step.budget if step.span.evicts else 0
    return beyond if beyond >= least else 0
