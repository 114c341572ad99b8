"""Every eviction goes through here: what has to wait before it, and what can be settled side by side.

A step's eviction is settled
- at once, where the next layer may need the memory or nothing is gained by waiting;
- at the end of the call, where every sequence gives up one token for a new one: then all layers of all caches that
  the model was called with stand as rows of one batch (see `kvbench.cache.joint`);
- once all layers are measured, where an allocator shares the budget out by their statistics;
- once the surprisal of a prompt's tokens is told, which only the model's last layer knows.
"""

from collections.abc import Sequence
from dataclasses import replace

from kvbench.cache.eviction import EvictingLayer
from kvbench.cache.evidence import Evidence
from kvbench.cache.joint import PendingEviction, give_up
from kvbench.policies.allocators.allocator import StatisticAllocator


class EvictionQueue:
    """The evictions of one call of the model, of one cache or of several that are called together."""

    def __init__(self) -> None:
        self._at_end: list[tuple[EvictingLayer, Evidence]] = []
        self._untold: list[tuple[EvictingLayer, Evidence]] = []

    def put(self, layer: EvictingLayer, shown: Evidence) -> None:
        """A layer is through with a step: settle its eviction now, or when what it waits for is known."""
        policy, now = layer.policy, shown.now
        if not shown.scored:
            layer.settle(now.prompt_done)
            return
        assert policy.scorer is not None
        if gives_up_with_others(layer, shown):
            self._at_end += [(layer, part) for part in shown.parts or (shown,)]
            return
        layer.observe(shown)
        if policy.scorer.needs_surprisal and now.phase != "decode":
            layer.unsettled = True
            tokens = replace(shown.observation, queries=shown.queries[:, :, :0].clone())
            self._untold.append((layer, replace(shown, look=lambda _: tokens)))
        elif isinstance(policy.allocator, StatisticAllocator) and now.phase != "decode":
            if any(now.evicts):
                _measure(layer, shown, policy.allocator)
        else:
            layer.shrink(shown)
        layer.limit_window(shown)
        layer.settle(now.prompt_done)

    def end_call(self) -> None:
        """The last layer is through: carry out what waited for it, side by side where that is possible."""
        waiting, self._at_end = self._at_end, []
        together = []
        for layer, shown in waiting:
            try:
                layer.observe(shown)
                excess = layer.excess(shown)
                if min(excess) == max(excess) == 1:
                    layer.give_back(shown, excess)
                    together.append(PendingEviction(layer, shown))
                else:
                    layer.shrink(shown)
                layer.limit_window(shown)
            except Exception as error:
                layer.cache.fail(error)
        give_up(together)
        for layer, prompt_done in {layer: shown.now.prompt_done for layer, shown in waiting}.items():
            layer.settle(prompt_done)

    def surprisal_told(self) -> None:
        """The surprisal of the prompt that was just taken in is known: score it, and evict where that is due."""
        waiting, self._untold = self._untold, []
        for layer, shown in waiting:
            layer.unsettled = False
            layer.observe(shown)
            layer.shrink(shown)
            layer.settle(shown.now.prompt_done)


def gives_up_with_others(layer: EvictingLayer, shown: Evidence) -> bool:
    """Whether a step's eviction may come with those of other layers: one token, decoded or a block, in every sequence.

    In a prompt only where the layer is at its size already: until then it may hold much more than its budget.
    """
    one = shown.alone and shown.now.aligned and shown.queries.shape[2] == 1
    return one and layer.held.side_by_side and layer.policy.gives_up_together and layer.replaces(shown.now.phase)


def _measure(layer: EvictingLayer, shown: Evidence, allocator: StatisticAllocator) -> None:
    """Rank a layer's prompt, and settle the shares as far as the allocator can with the layers measured so far.

    A cascading allocator brings all layers so far to their share at once; the others wait for the last layer.
    """
    cache, rows = layer.cache, shown.now.evicts
    layer.ranking = layer.rank(shown.observation)
    layer.unsettled = True
    over_mean = cache.budgets.exceeded(rows)
    cache.budgets.measured(over_mean, allocator.measure(shown.observation, layer.held.state))
    layers: Sequence[EvictingLayer] = cache.layers  # type: ignore[assignment]
    last = layer.index == len(layers) - 1
    if allocator.cascades or last:
        cache.budgets.share(over_mean)
        for ranked in layers[: layer.index + 1]:
            ranked.shrink_to_share(over_mean)
    if last:
        for ranked in layers:
            ranked.ranking, ranked.unsettled = None, False
            ranked.settle(shown.now.prompt_done)
