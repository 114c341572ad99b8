"""A policy is a composition of five decisions; this file composes them and turns them into kept slots."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from kvbench.policies.allocators.allocator import Allocator
from kvbench.policies.allocators.uniform import Uniform
from kvbench.policies.mergers.drop import Drop
from kvbench.policies.mergers.merger import Merger
from kvbench.policies.observation import Observation, State
from kvbench.policies.schedule import Prompt, Schedule
from kvbench.policies.scorers.scorer import Scorer
from kvbench.policies.select import select, victim
from kvbench.policies.stores.dense import Dense
from kvbench.policies.stores.store import Store
from kvbench.policies.values.value import ValueAware

Budget = int | float | None


def check_budget(budget: Budget) -> None:
    """ValueError unless the budget is a whole number of tokens >= 1 or a share of the prompt between 0 and 1."""
    allowed = "a whole number of tokens per KV head (1 or more) or a share of the prompt (above 0, below 1)"
    if isinstance(budget, bool) or not isinstance(budget, int | float) or math.isnan(budget):
        raise ValueError(f"budget must be {allowed}, got {budget!r}")
    if isinstance(budget, int) and budget < 1:
        raise ValueError(f"budget must be {allowed}, got {budget}")
    if isinstance(budget, float) and not 0 < budget < 1:
        raise ValueError(f"budget must be {allowed}, got {budget}")


@dataclass(frozen=True)
class Ranking:
    """How much each stored token of a layer is worth: all [B,H_kv,T]; `tie_break` decides between equal scores."""

    scores: Tensor
    tie_break: Tensor | None
    positions: Tensor
    protected: Tensor

    def select(self, keep: Tensor | int) -> Tensor:
        """The slots that stay, bool [B,H_kv,T]; keep: an int or counts [B,H_kv]."""
        return select(self.scores, self.tie_break, self.positions, self.protected, keep)

    def victim(self) -> Tensor:
        """The one slot to give up in every KV head, [B,H_kv,1]."""
        return victim(self.scores, self.tie_break, self.positions, self.protected)


@dataclass(frozen=True)
class Policy:
    """What a cache keeps. scorer None keeps every token (`full`), whatever the budget.

    budget: tokens per KV head per layer on average (int), or that share of the prompt (float below 1); window and sinks
    are inside it. granularity: one token set per `kv_head`, one per `query_head` (keys and values are then stored
    H_q / H_kv times, and the budget counts per query head), or one for all heads of a `layer`.
    Raises ValueError for a combination that has no meaning or a budget smaller than what is protected.
    """

    scorer: Scorer | None = None
    value: ValueAware | None = None
    allocator: Allocator = field(default_factory=Uniform)
    merger: Merger = field(default_factory=Drop)
    store: Store = field(default_factory=Dense)
    schedule: Schedule = field(default_factory=Prompt)
    granularity: Literal["kv_head", "query_head", "layer"] = "kv_head"
    budget: Budget = None
    name: str = "policy"

    def __post_init__(self) -> None:
        if self.granularity not in ("kv_head", "query_head", "layer"):
            raise ValueError(f"granularity must be kv_head, query_head or layer, got {self.granularity!r}")
        if self.scorer is None:
            if self.value is not None:
                raise ValueError(f"{self.name} keeps every token, so there are no scores for a value-aware wrapper")
            return
        if self.value is not None and self.scorer.ranks_by_position:
            raise ValueError(f"{self.name} ranks tokens by position, so there are no scores for a value-aware wrapper")
        if self.budget is None:
            raise ValueError(f"{self.name} needs a budget: tokens per KV head (such as 512) or a share (such as 0.2)")
        check_budget(self.budget)
        if isinstance(self.budget, int):
            self.check_protected(self.budget)

    @property
    def evicts(self) -> bool:
        return self.scorer is not None

    @property
    def per_query_head(self) -> bool:
        """Whether running statistics are kept per query head instead of averaged over the group."""
        return self.value is not None and (self.value.reads_query_heads or self.granularity == "layer")

    @property
    def statistics(self) -> tuple[str, ...]:
        return self.scorer.statistics if self.scorer else ()

    @property
    def queries_needed(self) -> int:
        return self.scorer.queries_needed if self.scorer else 0

    def check_protected(self, budget: int) -> None:
        """ValueError if a layer's budget is smaller than the tokens that are always kept."""
        assert self.scorer is not None
        first, newest = self.scorer.protects_first(budget), self.scorer.protects_newest(budget)
        if budget < 1:
            raise ValueError(
                f"the budget leaves {self.name} {budget} slots per KV head in some layer; it must leave at least 1"
            )
        if first + newest > budget:
            parts = [f"{n} {what}" for n, what in ((first, "sinks"), (newest, "newest tokens")) if n]
            raise ValueError(
                f"budget {budget} is smaller than what {self.name} always keeps ({' and '.join(parts)}); "
                f"it must be at least {first + newest}"
            )

    def layer_budgets(self, layers: int, length: int | None) -> list[int]:
        """Slots per KV head of each layer for one sequence with a prompt of `length` tokens; the sum is exact.

        A share is round(share * length * layers) slots in total. ValueError if it needs an unknown length, or leaves a
        layer less than what is always kept.
        """
        assert self.budget is not None
        if isinstance(self.budget, int):
            total = self.budget * layers
        elif length is None:
            raise ValueError(
                f"a budget that is a share of the prompt ({self.budget}) needs the prompt's length before its end: "
                "pass KVCache(..., prompt_length=...)"
            )
        else:
            total = round(self.budget * length * layers)
        budgets = self.allocator.split(total, layers, length)
        assert sum(budgets) == total, "an allocator must deal out exactly the total"
        for budget in budgets:
            self.check_protected(budget)
        return budgets

    def protected(self, observation: Observation, budgets: Sequence[int]) -> Tensor:
        """Tokens that always stay, bool [B,H_kv,T]; budgets: this layer's slots for each sequence of the batch."""
        assert self.scorer is not None
        first = [self.scorer.protects_first(b) for b in budgets]
        newest = [self.scorer.protects_newest(b) for b in budgets]
        if not any(first) and not any(newest):
            return observation.occupied & False
        per_row = observation.seen.new_tensor
        sinks = observation.first(first[0] if len(set(first)) == 1 else per_row(first)[:, None, None])
        return sinks | observation.newest(newest[0] if len(set(newest)) == 1 else per_row(newest)[:, None, None])

    def rank(self, observation: Observation, state: State, budgets: Sequence[int]) -> Ranking:
        """Score every stored token of a layer: a pure function of what was observed."""
        assert self.scorer is not None
        protected = self.protected(observation, budgets)
        scores = self.scorer.score(observation, state)
        layer_wide = self.granularity == "layer"
        if layer_wide:
            scores = scores.mean(1, keepdim=True).expand_as(scores)
        if self.value is None:
            return Ranking(scores, None, observation.positions, protected)
        valued = self.value.score(self.scorer, scores, observation, state, protected, layer_wide)
        return Ranking(valued, scores, observation.positions, protected)


def compress(policy: Policy, observations: Sequence[Observation], states: Sequence[State]) -> list[Tensor]:
    """The slots every layer keeps, bool [B,H_kv,T] each: selection as a pure function of recorded observations.

    One prefill, recorded once, can so serve many policies and budgets. observations, states: one per layer.
    """
    lengths = observations[0].seen.tolist()
    per_row = [policy.layer_budgets(len(observations), length) for length in lengths]
    kept = []
    for layer, (observation, state) in enumerate(zip(observations, states, strict=True)):
        budgets = [row[layer] for row in per_row]
        counts = observation.seen.new_tensor(budgets)[:, None].expand(-1, observation.keys.shape[1])
        kept.append(policy.rank(observation, state, budgets).select(counts))
    return kept
