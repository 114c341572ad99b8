"""A policy: the composition of scorer, value, allocator, merger, store and schedule, and the ranking of tokens."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from kvbench.policies.allocators.allocator import Allocator
from kvbench.policies.allocators.uniform import Uniform
from kvbench.policies.checks import check_choices
from kvbench.policies.mergers.drop import Drop
from kvbench.policies.mergers.merger import Merger
from kvbench.policies.needs import Needs
from kvbench.policies.observation import MOVED, Observation, State
from kvbench.policies.policy_checks import (
    check_budget,
    check_merger,
    check_protected,
    check_reader,
    check_schedule,
    check_statistics,
    check_value,
)
from kvbench.policies.pre_passes.pre_pass import BlockPasses, PrePass, TokenRating
from kvbench.policies.ranking import Ranking, half_the_bits
from kvbench.policies.readers.reader import Reader
from kvbench.policies.schedule import Prompt, Schedule
from kvbench.policies.scorers.scorer import Scorer, protected_counts
from kvbench.policies.selections.selection import Selection
from kvbench.policies.stores.dense import Dense
from kvbench.policies.stores.store import Store
from kvbench.policies.values.value import ValueAware

Budget = int | float | None


@dataclass(frozen=True)
class Policy:
    """A composition of parts that defines which tokens a cache keeps. scorer None keeps every token (`full`).

    budget: tokens per KV head per layer on average (int), or that share of the prompt (float below 1); it includes
    window and sinks; always None if the allocator determines the budget. granularity: one token set per `kv_head`, one
    per `query_head` (keys and values are then stored H_q / H_kv times, and the budget counts per query head), or one
    for all heads of a `layer`. selection: units of tokens that are kept or evicted together; None: single tokens.
    reader: sparse attention, in which a decoded query reads `budget` of all tokens. pre_pass: forward passes before
    eviction; defaults to the scorer's pre-pass and works only with kvbench's generation loop.
    Raises ValueError for an invalid combination or a budget smaller than the protected tokens.
    """

    scorer: Scorer | None = None
    value: ValueAware | None = None
    selection: Selection | None = None
    allocator: Allocator = field(default_factory=Uniform)
    merger: Merger = field(default_factory=Drop)
    store: Store = field(default_factory=Dense)
    schedule: Schedule = field(default_factory=Prompt)
    reader: Reader | None = None
    granularity: Literal["kv_head", "query_head", "layer"] = "kv_head"
    pre_pass: PrePass | None = None
    budget: Budget = None
    name: str = "policy"

    def __post_init__(self) -> None:
        check_choices(self)
        check_value(self.name, self.value, self.scorer, self._values_query_heads)
        if self.reader is not None:
            check_reader(self.name, self.reader, self.scorer, self.store, self.schedule, self.granularity)
        if self.scorer is None:
            if self.reader is not None and self.reader.mass is not None:
                object.__setattr__(self, "budget", None)  # it reads until the mass is reached
            elif self.pre_pass is not None or self.reader is not None:
                check_budget(self.budget, self.name)
            return
        if self.scorer.pre_pass is not None:
            if self.pre_pass not in (None, self.scorer.pre_pass):
                raise ValueError(f"{self.name}'s scorer already has a pre-pass, so pre_pass must not be set")
            needless = isinstance(self.scorer.pre_pass, BlockPasses) and isinstance(self.schedule, Prompt)
            object.__setattr__(self, "pre_pass", None if needless else self.scorer.pre_pass)
        self.allocator.check_policy(self.name, self.scorer.needs.window)
        self.store.check_policy(self.name, self.schedule.decode == "evict", self.allocator.per_head)
        check_schedule(self.name, self.schedule, self.scorer, self.allocator)
        check_statistics(self.name, self.scorer, self.allocator, self.merger)
        check_merger(self.name, self.merger, self.allocator, self.store)
        if self.allocator.sets_budget:
            object.__setattr__(self, "budget", None)
        else:
            check_budget(self.budget, self.name)
        if isinstance(self.budget, int) and self.reader is None:
            check_protected(self.name, self.scorer, self.allocator, self.budget)

    @property
    def evicts(self) -> bool:
        """Whether the policy evicts tokens."""
        return self.scorer is not None

    @cached_property
    def needs(self) -> Needs:
        """The combined requirements of the parts; `window_decoding` is a number if the policy evicts."""
        if self.scorer is None:
            return Needs()
        own = self.scorer.needs
        decoding = own.window if own.window_decoding is None else own.window_decoding
        found = () if self.pre_pass is None else self.pre_pass.statistics
        rotates = self.schedule.rerotate
        model = own.model or rotates or (self.value is not None and self.value.needs.model)
        return replace(
            own,
            statistics=tuple(dict.fromkeys((*own.statistics, *found, *[MOVED] * rotates))),
            window=max(own.window, self.allocator.needs.window, self.merger.needs.window),
            window_decoding=decoding if self.schedule.decode == "evict" else 0,
            model=model,
            layer=own.layer or self.merger.needs.layer or model,
            query_heads=self._values_query_heads or self.allocator.needs.query_heads,
        )

    @cached_property
    def layers_alike(self) -> bool:
        """Whether all layers can be rows of one batch if each evicts one token after a decoded one."""
        return self.evicts and self.schedule.one_each and not (self.needs.kept or self.needs.layer)

    @property
    def rates(self) -> bool:
        """Whether a pre-pass rates each token from the logits before it, so that tokens are processed one by one."""
        return isinstance(self.pre_pass, TokenRating)

    @property
    def _values_query_heads(self) -> bool:
        return self.value is not None and (self.value.needs.query_heads or self.granularity == "layer")

    def for_example(self, run_seed: int, example: int) -> "Policy":
        """The policy for one example of a run, whose scorer may use other random numbers than for other examples."""
        scorer = None if self.scorer is None else self.scorer.for_example(run_seed, example)
        return self if scorer is self.scorer else replace(self, scorer=scorer)

    def rank(self, observation: Observation, state: State) -> Ranking:
        """Score every stored token of a layer; a pure function of the observation."""
        assert self.scorer is not None
        sequences, slots = observation.sequences, observation.slots
        first, newest = protected_counts(self.scorer, sequences.budgets)
        if self.schedule.protect == "prompt":
            first = list(sequences.prompts)
        stays = observation.protected(first, newest)
        spared = self.scorer.spares(observation, state, stays)
        stays = stays if spared is None else stays | spared
        if self.needs.evictable:
            observation.evictable = observation.occupied & ~stays
        scores = observation.scores(self.scorer.score, state, self.needs.keys)
        if self.needs.ties:
            scores = half_the_bits(scores)
        layer_wide = self.granularity == "layer"
        if layer_wide:
            scores = scores.mean(1, keepdim=True).expand_as(scores)
        found, tie_break = scores, None
        if self.value is not None:
            valued = self.value.score(self.scorer, scores, observation, state, stays, layer_wide)
            found, tie_break = half_the_bits(valued) if self.needs.ties else valued, scores
        how = slots.packed, slots.ascending
        ranking = Ranking(found, tie_break, observation.positions, stays, observation.seen, spared, *how)
        return ranking if self.selection is None else self.selection.rank(ranking)
