"""Budgets that depend on what the layers hold: an allocator measures the layers of a prompt, and divides the budget.

Shapes: H_kv KV heads, T slots.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, groupby
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from kvbench.cache.attend import backend_of
from kvbench.cache.cascade import can_cut, cut_to_shares
from kvbench.cache.compaction import compact, takes_rows
from kvbench.cache.eviction import StepRows, excess_of, form_of, note_decision, similar
from kvbench.cache.extra import Extra, When
from kvbench.cache.rows import Rows
from kvbench.cache.step import Step
from kvbench.policies.allocators.allocator import JointAllocator, StatisticAllocator
from kvbench.policies.allocators.threshold import Threshold
from kvbench.policies.constants import OnItsWay, on_its_way
from kvbench.policies.observation import Observation, StepCache
from kvbench.policies.ranking import Ranking
from kvbench.policies.scorers.scorer import protected_counts

Result = TypeVar("Result")
MEASURING = (StatisticAllocator, JointAllocator, Threshold)
"""Allocators whose budgets depend on what the layers hold."""


class RankedLayer(NamedTuple):
    """A layer of a prompt that was ranked: its step without queries, the tokens per KV head beyond an even share, and,
    for some allocators, the statistics of several layers and its row of them.
    """

    step: Step
    excess: int
    statistics: OnItsWay | None
    row: int


class MeasuredBudgets(Extra):
    """Ranks the layers of a prompt, several at once, and evicts once their budgets are known.

    Statistics are on their way to the host until the next layer begins, so that a GPU works on the rest of the layer
    while the host waits for them.
    """

    def __init__(self) -> None:
        self._measured: list[RankedLayer] = []

    def before_eviction(self, step: Step) -> When:
        allocator = step.policy.allocator
        if step.observed and isinstance(allocator, Threshold):
            _evict_below(step, allocator)
            return "later"
        return "now"

    def rows(self, steps: Sequence[Step], known: StepCache) -> Rows | None:
        allocator, decodes = steps[0].policy.allocator, steps[0].phase == "decode"
        if not isinstance(allocator, StatisticAllocator | JointAllocator):
            return None
        if decodes and not (isinstance(allocator, JointAllocator) and not allocator.per_head):
            return None
        return MeasuredRows(steps, known, self._measured)

    def between_layers(self) -> None:
        """Divide the budgets among the layers that were measured since the last call, and evict."""
        due, self._measured[:] = sorted(self._measured, key=lambda one: one.step.layer.index), []
        for index, measured in groupby(due, lambda one: one.step.layer.index):
            layers = list(measured)
            cut = [one.step for one in layers if _attempt([one.step], partial(_share, one))]
            if cut:
                _attempt(cut, partial(cut_to_shares, [step.sequence for step in cut], index + 1))
            for one in layers:
                if index == len(one.step.sequence.layers) - 1:
                    _attempt([one.step], partial(_settle_all, one.step))


class MeasuredRows(StepRows):
    """Layers of a prompt that are ranked and measured, and evicted once all are."""

    frees = False

    def __init__(self, steps: Sequence[Step], known: StepCache, measured: list[RankedLayer]) -> None:
        super().__init__(steps, known)
        self._measured = measured

    def is_due(self) -> bool:
        exceeds, step = super().is_due(), self._steps[0]
        return step.span.evicts and (exceeds or step.phase != "decode")

    def free(self, ranking: Ranking) -> None:
        allocator, statistics = self.policy.allocator, None
        if isinstance(allocator, StatisticAllocator):
            statistics = on_its_way(allocator.measure(self.observation, self.state))
        for row, (step, own) in enumerate(zip(self._steps, ranking.rows(), strict=True)):
            step.layer.ranking, step.layer.unsettled = own, True
            self._measured.append(RankedLayer(step.of_layer(step.layer), excess_of(step), statistics, row))


def _attempt(steps: Sequence[Step], call: Callable[[], Result]) -> Result | None:
    """The result of a call for some steps; None if one of their sequences has failed, or all fail by its error."""
    try:
        return None if any(step.sequence.error for step in steps) else call()
    except Exception as error:
        for step in steps:
            step.sequence.fail(error)
        return None


def _evict_below(step: Step, allocator: Threshold) -> None:
    """Evict the tokens below a threshold."""
    rows = StepRows([step], {})
    rows.observe()
    if not step.span.evicts:
        return
    note_decision(step)
    ranking = allocator.marked(rows.rank())
    _evict_unequally(step, ranking, ranking.protected.sum(-1), step.observation)


def _evict_unequally(step: Step, ranking: Ranking, heads: Tensor, seen: Observation | None = None) -> None:
    """Evict down to the tokens [1,H_kv] of each head that no budget bounds; a layer counts those of its longest one."""
    evicted = (ranking.occupied.sum(-1) - heads).max()
    longest, total, excess = torch.stack([heads.max(), heads.sum(), evicted]).tolist()
    if excess > 0:
        compact([step], ranking, [longest], seen, per_head=heads)
        step.layer.short = longest - total / heads.numel()


def _share(measured: RankedLayer) -> bool:
    """Divide the budget among the layers measured so far: after each layer if the allocator cascades, else once.

    Returns whether they are still to be cut to their shares, together with those of other policies.
    """
    step, allocator = measured.step, measured.step.policy.allocator
    sequence, last = step.sequence, step.layer.index == len(step.sequence.layers) - 1
    if isinstance(allocator, JointAllocator):
        if last:
            _compact_jointly(step, allocator, measured.excess)
        return False
    assert isinstance(allocator, StatisticAllocator)
    assert measured.statistics is not None
    if sequence.budgets.leaves_whole:
        return False
    sequence.budgets.measured(step.layer.index, measured.statistics()[measured.row].tolist())
    if not allocator.cascades and not last:
        return False
    sequence.budgets.share()
    if allocator.cascades and can_cut(sequence):
        return True
    _compact_to_shares([step.of_layer(layer) for layer in sequence.layers[: step.layer.index + 1]])
    return False


def _compact_to_shares(steps: Sequence[Step]) -> None:
    """Evict from layers of a sequence that were ranked already, down to their shares."""
    shares = steps[0].sequence.budgets.shares
    due = [step for step in steps if step.layer.count > shares[step.layer.index]]
    together = all(takes_rows(step) for step in due) and not steps[0].policy.needs.layer
    alike: dict[object, list[Step]] = {}
    for step in due:
        alike.setdefault(form_of(step.layer) if together else step.layer, []).append(step)
    most = backend_of(steps[0].store.positions).workspace
    each = (similar(some, [shares[step.layer.index] for step in some], most) for some in alike.values())
    for some in chain.from_iterable(each):
        budgets = [shares[step.layer.index] for step in some]
        rankings = [step.layer.ranking for step in some if step.layer.ranking is not None]
        assert some[0].policy.scorer is not None
        counts = protected_counts(some[0].policy.scorer, budgets)
        ranking = Ranking.joined(rankings).protecting(*counts)
        compact(some, ranking, budgets)
        for step in some:
            step.sequence.note_bytes(step.layer.index)


def _compact_jointly(step: Step, allocator: JointAllocator, excess: int) -> None:
    """Evict from all layers, down to the slots that an allocator chose for every layer and head together."""
    sequence = step.sequence
    budgets = sequence.budgets.shares
    rankings = allocator.rank_of_all([layer.ranking for layer in sequence.layers if layer.ranking is not None])
    slots = allocator.heads_of_all(rankings, [[budget] for budget in budgets])
    for layer, ranking, budget, heads in zip(sequence.layers, rankings, budgets, slots, strict=True):
        own, heads = step.of_layer(layer), heads.to(ranking.scores.device)
        if allocator.sets_budget:
            _evict_unequally(own, ranking, heads)
        elif excess > 0:
            compact([own], ranking, [budget], per_head=heads)
        sequence.note_bytes(layer.index)


def _settle_all(step: Step) -> None:
    """Every layer has its share: drop the rankings and settle the stores."""
    for layer in step.sequence.layers:
        layer.ranking, layer.unsettled = None, False
        step.of_layer(layer).settle()
