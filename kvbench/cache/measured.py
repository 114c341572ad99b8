"""Budgets that depend on what the layers hold: an allocator measures the layers of a prompt, and divides the budget.

Shapes: H_kv KV heads, T slots.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import TypeVar

import torch
from torch import Tensor

from kvbench.cache.cascade import can_cut, cut_to_shares
from kvbench.cache.eviction import StepRows, compact, excess_of, note_decision
from kvbench.cache.extra import Extra, When
from kvbench.cache.step import Step
from kvbench.policies.allocators.allocator import JointAllocator, StatisticAllocator
from kvbench.policies.allocators.threshold import Threshold
from kvbench.policies.constants import OnItsWay, on_its_way
from kvbench.policies.observation import Observation
from kvbench.policies.ranking import Ranking
from kvbench.policies.scorers.scorer import protected_counts

Result = TypeVar("Result")
MEASURING = (StatisticAllocator, JointAllocator, Threshold)
"""Allocators whose budgets depend on what the layers hold."""


class MeasuredBudgets(Extra):
    """Ranks the layers of a prompt, and evicts once their budgets are known.

    Statistics are on their way to the host until the next layer begins, so that a GPU works on the rest of the layer
    while the host waits for them.
    """

    def __init__(self) -> None:
        self._measured: list[tuple[Step, OnItsWay]] = []

    def before_eviction(self, step: Step) -> When:
        allocator = step.policy.allocator
        if not step.observed:
            return "now"
        if isinstance(allocator, Threshold):
            _evict_below(step, allocator)
            return "later"
        alone = step.phase == "decode" and not (isinstance(allocator, JointAllocator) and not allocator.per_head)
        if alone or not isinstance(allocator, StatisticAllocator | JointAllocator):
            return "now"
        rows = StepRows([step])
        rows.observe()
        exceeds = rows.is_due()
        if step.span.evicts and (exceeds or step.phase != "decode"):
            self._rank(step, rows, allocator)
        return "later"

    def _rank(self, step: Step, rows: StepRows, allocator: StatisticAllocator | JointAllocator) -> None:
        layer, last = step.layer, step.layer.index == len(step.sequence.layers) - 1
        layer.ranking, layer.unsettled = rows.rank(), True
        if isinstance(allocator, StatisticAllocator):
            statistic = on_its_way(allocator.measure(step.observation, layer.store.state))
            self._measured.append((step.of_layer(layer), statistic))  # without the queries of the prompt
            if last:
                self.begin_layer()
        elif last:
            _compact_jointly(step, allocator)

    def begin_layer(self) -> None:
        """Divide the budgets among the layers that were measured since the last call, and evict."""
        due, self._measured = self._measured, []
        for index, measured in groupby(due, lambda one: one[0].layer.index):
            steps = list(measured)
            cut = [step for step, statistic in steps if _attempt([step], partial(_share, step, statistic))]
            if cut:
                _attempt(cut, partial(cut_to_shares, [step.sequence for step in cut], index + 1))
            for step, _ in steps:
                if index == len(step.sequence.layers) - 1:
                    _attempt([step], partial(_settle_all, step))


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
    rows = StepRows([step])
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
        compact([step], ranking, longest, excess, seen, per_head=heads)
        step.layer.short = longest - total / heads.numel()


def _share(step: Step, statistic: OnItsWay) -> bool:
    """Divide the budget among the layers measured so far: after each layer if the allocator cascades, else once.

    Returns whether they are still to be cut to their shares, together with those of other policies.
    """
    sequence, allocator = step.sequence, step.policy.allocator
    assert isinstance(allocator, StatisticAllocator)
    if sequence.budgets.leaves_whole:
        return False
    sequence.budgets.measured(statistic()[0].tolist())
    if not allocator.cascades and step.layer.index < len(sequence.layers) - 1:
        return False
    sequence.budgets.share()
    if allocator.cascades and can_cut(sequence):
        return True
    for layer in sequence.layers[: step.layer.index + 1]:
        _compact_to_share(step.of_layer(layer))
    return False


def _compact_to_share(step: Step) -> None:
    """Evict from a layer that was ranked already, down to its share."""
    layer, budget = step.layer, step.sequence.budgets.shares[step.layer.index]
    assert layer.ranking is not None
    assert step.policy.scorer is not None
    excess = layer.count - budget
    if excess > 0:
        ranking = layer.ranking.protecting(*protected_counts(step.policy.scorer, [budget]))
        compact([step], ranking, budget, excess)
        step.sequence.note_bytes(layer.index)


def _compact_jointly(step: Step, allocator: JointAllocator) -> None:
    """Evict from all layers, down to the slots that an allocator chose for every layer and head together."""
    sequence, excess = step.sequence, excess_of(step)
    budgets = sequence.budgets.shares
    rankings = allocator.rank_of_all([layer.ranking for layer in sequence.layers if layer.ranking is not None])
    slots = allocator.heads_of_all(rankings, [[budget] for budget in budgets])
    for layer, ranking, budget, heads in zip(sequence.layers, rankings, budgets, slots, strict=True):
        own, heads = step.of_layer(layer), heads.to(ranking.scores.device)
        if allocator.sets_budget:
            _evict_unequally(own, ranking, heads)
        elif excess > 0:
            compact([own], ranking, budget, excess, per_head=heads)
        sequence.note_bytes(layer.index)
    _settle_all(step)


def _settle_all(step: Step) -> None:
    """Every layer has its share: drop the rankings and settle the stores."""
    for layer in step.sequence.layers:
        layer.ranking, layer.unsettled = None, False
        step.of_layer(layer).settle()
