"""A policy is a composition of five decisions; this file composes them and turns them into kept slots."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Literal

from kvbench.policies.allocators.allocator import Allocator, StatisticAllocator
from kvbench.policies.allocators.uniform import Uniform
from kvbench.policies.checks import LARGEST, choice, whole_number
from kvbench.policies.filters.gemfilter import GemFilter
from kvbench.policies.mergers.drop import Drop
from kvbench.policies.mergers.merger import Merger
from kvbench.policies.needs import Needs
from kvbench.policies.observation import Observation, State
from kvbench.policies.ranking import Ranking, half_the_bits
from kvbench.policies.schedule import Prompt, Schedule
from kvbench.policies.scorers.scorer import AttentionScorer, Scorer
from kvbench.policies.stores.dense import Dense
from kvbench.policies.stores.store import Store
from kvbench.policies.values.value import ValueAware

Budget = int | float | None
_RULES: dict[object, object] = {}


def check_budget(budget: Budget) -> None:
    """ValueError unless the budget is a whole number of tokens >= 1 or a share of the prompt between 0 and 1."""
    allowed = "a whole number of tokens per KV head (1 or more) or a share of the prompt (above 0, below 1)"
    if isinstance(budget, bool) or not isinstance(budget, int | float) or math.isnan(budget):
        raise ValueError(f"budget must be {allowed}, got {budget!r}")
    if isinstance(budget, int) and not 1 <= budget <= LARGEST:
        raise ValueError(f"budget must be {allowed}, got {budget}")
    if isinstance(budget, float) and not 0 < budget < 1:
        raise ValueError(f"budget must be {allowed}, got {budget}")


@dataclass(frozen=True)
class Policy:
    """What a cache keeps. scorer None keeps every token (`full`), whatever the budget.

    budget: tokens per KV head per layer on average (int), or that share of the prompt (float below 1); window and sinks
    are inside it. granularity: one token set per `kv_head`, one per `query_head` (keys and values are then stored
    H_q / H_kv times, and the budget counts per query head), or one for all heads of a `layer`. filter: rewrites the
    prompt to `budget` tokens before anything is cached; only our own generation can drive it.
    Raises ValueError for a combination that has no meaning or a budget smaller than what is protected.
    """

    scorer: Scorer | None = None
    value: ValueAware | None = None
    allocator: Allocator = field(default_factory=Uniform)
    merger: Merger = field(default_factory=Drop)
    store: Store = field(default_factory=Dense)
    schedule: Schedule = field(default_factory=Prompt)
    granularity: Literal["kv_head", "query_head", "layer"] = "kv_head"
    filter: GemFilter | None = None
    budget: Budget = None
    name: str = "policy"

    def __post_init__(self) -> None:
        choice("granularity", self.granularity, "kv_head", "query_head", "layer")
        if self.scorer is None:
            if self.value is not None:
                raise ValueError(f"{self.name} keeps every token, so there are no scores for a value-aware wrapper")
            if self.filter is not None:
                self._check_budget()
            return
        needs = self.scorer.needs
        self.allocator.check_policy(self.name, needs.window)
        self.store.check_policy(self.name, self.schedule.decode == "evict", self.allocator.per_head)
        if self.value is not None and needs.by_position:
            raise ValueError(f"{self.name} ranks tokens by position, so there are no scores for a value-aware wrapper")
        scores_query_heads = isinstance(self.scorer, AttentionScorer) and not needs.kv_heads_only
        if self._values_query_heads and not scores_query_heads:
            raise ValueError(
                f"{self.name} scores KV heads, not query heads, so gqa=group_l2, gqa=score_mean and granularity=layer "
                "with a value-aware wrapper have no meaning for it; use gqa=alpha_mean"
            )
        if needs.whole_prompt and not isinstance(self.schedule, Prompt):
            raise ValueError(f"{self.name} is defined on the whole prompt only, so schedule=blocks cannot drive it")
        if needs.surprisal and (
            isinstance(self.allocator, StatisticAllocator)
            or self.schedule.order != "attend_then_evict"
            or self.schedule.late
        ):
            raise ValueError(
                f"{self.name} scores a prompt when all layers are done with it, so order=evict_then_attend, late=true "
                "and allocators that read each layer's statistics cannot go with it"
            )
        if isinstance(self.allocator, StatisticAllocator) and (
            not isinstance(self.schedule, Prompt) or self.schedule.order != "attend_then_evict"
        ):
            raise ValueError(
                f"the allocator of {self.name} needs statistics of all layers, so only schedule=prompt with "
                "order=attend_then_evict can drive it"
            )
        if isinstance(self.allocator, StatisticAllocator) and needs.kept:
            raise ValueError(
                f"{self.name} scores a layer by what earlier layers kept, but its allocator settles no layer before it "
                "was scored: use one that shares by rule, such as uniform or pyramid"
            )
        for what, part in (("allocator", self.allocator), ("merger", self.merger)):
            missing = [name for name in part.needs.statistics if name not in needs.statistics]
            if missing:
                raise ValueError(
                    f"the {what} of {self.name} reads {' and '.join(missing)}, which its scorer "
                    f"{type(self.scorer).__name__} does not keep; use one that does, such as h2o"
                )
        self._check_budget()
        if isinstance(self.budget, int):
            self.check_protected(self.budget)

    def _check_budget(self) -> None:
        if self.budget is None:
            raise ValueError(f"{self.name} needs a budget: tokens per KV head (such as 512) or a share (such as 0.2)")
        check_budget(self.budget)

    @property
    def evicts(self) -> bool:
        return self.scorer is not None

    @cached_property
    def needs(self) -> Needs:
        """What its parts need together."""
        if self.scorer is None:
            return Needs()
        own = self.scorer.needs
        return replace(
            own,
            window=max(own.window, self.allocator.needs.window),
            window_decoding=own.queries_decoding if self.schedule.decode == "evict" else 0,
            layer=own.layer or self.merger.needs.layer,
            query_heads=self._values_query_heads or self.allocator.needs.query_heads,
        )

    @property
    def _values_query_heads(self) -> bool:
        return self.value is not None and (self.value.needs.query_heads or self.granularity == "layer")

    @cached_property
    def gives_up_together(self) -> bool:
        """Whether all layers may be rows of one batch when each gives up a token after a decoded one."""
        schedule = self.schedule
        if self.scorer is None or schedule.decode != "evict" or schedule.order != "attend_then_evict":
            return False
        return not (self.needs.kept or self.needs.layer)

    @cached_property
    def rule(self) -> object:
        """What decides over one token of a layer, whatever its budget: the same object for policies that agree in it.

        An object, because hashing the parts anew for every layer and token costs more than the decision's launches.
        """
        parts = self.scorer, self.value, self.merger, self.granularity, self.needs.query_heads
        try:
            return _RULES.setdefault(parts, object())
        except TypeError:  # a part from elsewhere, with a list among its knobs
            return object()

    @cached_property
    def apart_from_budget(self) -> object:
        """The same object for policies that differ in the budget alone."""
        parts = tuple(getattr(self, part.name) for part in fields(self) if part.name != "budget")
        try:
            return _RULES.setdefault(parts, object())
        except TypeError:  # as in `rule`
            return object()

    @property
    def least_budget(self) -> int:
        """The smallest budget of a layer that makes sense (slots per KV head)."""
        assert self.scorer is not None
        return max(self.scorer.least_budget, self.allocator.needs.window, 1)

    def leaves_whole(self, layers: int, length: int) -> bool:
        """Whether an allocator with statistics evicts nothing of a prompt of `length` tokens."""
        assert isinstance(self.allocator, StatisticAllocator)
        return self.allocator.leaves_whole(length, self.total(layers, length), layers, self.least_budget)

    def check_next_prompt(self) -> None:
        """ValueError where another prompt, on the cache of a first one, could not be brought to the budget."""
        if not self.evicts:
            return
        if not self.store.reopens:
            raise ValueError(
                f"{self.name} holds what it kept of a prompt in quantised groups, which cannot give a token up, so the "
                "cache could not return to its budget after another prompt: use a dense store, or a new cache for the "
                "whole conversation"
            )
        self.allocator.check_next_prompt(self.name)

    def check_protected(self, budget: int) -> None:
        """ValueError if a layer's budget is smaller than the tokens that are always kept."""
        assert self.scorer is not None
        first, newest = self.scorer.protects(budget)
        whole_number(f"the first tokens that {self.name}'s scorer protects", first, 0)
        whole_number(f"the newest tokens that {self.name}'s scorer protects", newest, 0)
        least = max(self.least_budget, first + newest)
        if budget >= least:
            return
        parts = [f"{n} {what}" for n, what in ((first, "sinks"), (newest, "newest tokens")) if n]
        always = f" ({' and '.join(parts)} are always kept)" if parts else ""
        raise ValueError(
            f"a budget of {budget} tokens per KV head is too small for {self.name}: it must be at least {least}{always}"
        )

    def check_layers(self, layers: int) -> None:
        """ValueError if a part names a layer that a model with `layers` of them does not have."""
        self.allocator.check_layers(layers)
        self.store.check_layers(layers)
        if self.filter is not None:
            self.filter.check_layers(layers)

    def total(self, layers: int, length: int | None) -> int:
        """Slots per KV head over all layers for one sequence with a prompt of `length` tokens.

        A share is round(share * length * layers). ValueError if a share needs an unknown length.
        """
        assert self.budget is not None
        if isinstance(self.budget, int):
            return self.budget * layers
        if length is None:
            raise ValueError(
                f"a budget that is a share of the prompt ({self.budget}) needs the prompt's length before its end: "
                "pass KVCache(..., prompt_length=...)"
            )
        return round(self.budget * length * layers)

    def layer_budgets(self, layers: int, length: int | None) -> list[int]:
        """Slots per KV head of each layer for one sequence with a prompt of `length` tokens; the sum is exact.

        With an allocator that needs statistics: the even split its layers have before anything was measured.
        ValueError if a layer gets less than what is always kept.
        """
        assert self.scorer is not None
        total = self.total(layers, length)
        self.check_protected(total // layers)
        budgets = self.allocator.split(total, layers, length, self.least_budget)
        assert sum(budgets) == total or not self.allocator.exact, "an allocator must deal out exactly the total"
        for budget in budgets:
            self.check_protected(budget)
        return budgets

    def shared_budgets(self, statistics: Sequence[Sequence[float]], layers: int, length: int) -> list[int]:
        """Slots per KV head of the layers measured so far, one statistic each, for a prompt beyond the budget."""
        assert isinstance(self.allocator, StatisticAllocator)
        assert self.scorer is not None
        total, floor = self.total(layers, length), self.least_budget
        budgets = self.allocator.share(statistics, total, layers, floor, length)
        if not self.allocator.exact:
            return budgets
        to_come = layers - len(statistics)
        assert all(floor <= budget <= length for budget in budgets), "a layer's share must lie within its bounds"
        assert sum(budgets) == total if to_come == 0 else sum(budgets) <= total - floor * to_come
        return budgets

    def protected_counts(self, budgets: Sequence[int]) -> tuple[list[int], list[int]]:
        """How many first and how many newest tokens always stay, for each sequence's budget of a layer."""
        assert self.scorer is not None
        protected = [self.scorer.protects(budget) for budget in budgets]
        return [some.first for some in protected], [some.newest for some in protected]

    def keeps_window(self, budgets: Sequence[int]) -> bool:
        """Whether the tokens of the queries that are looked through always stay, so that each query sees one."""
        assert self.scorer is not None
        return all(self.scorer.protects(budget).newest >= self.needs.window for budget in budgets)

    def rank(self, observation: Observation, state: State) -> Ranking:
        """Score every stored token of a layer: a pure function of what was observed."""
        assert self.scorer is not None
        stays = observation.protected(*self.protected_counts(observation.budgets))
        spared = self.scorer.spares(observation, state, stays)
        stays = stays if spared is None else stays | spared
        scores = self.scorer.score(observation, state)
        if self.needs.ties:
            scores = half_the_bits(scores)
        layer_wide = self.granularity == "layer"
        if layer_wide:
            scores = scores.mean(1, keepdim=True).expand_as(scores)
        known = observation.packed, observation.ascending
        if self.value is None:
            return Ranking(scores, None, observation.positions, stays, observation.seen, spared, *known)
        valued = self.value.score(self.scorer, scores, observation, state, stays, layer_wide)
        valued = half_the_bits(valued) if self.needs.ties else valued
        return Ranking(valued, scores, observation.positions, stays, observation.seen, spared, *known)
