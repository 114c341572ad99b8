"""A policy: the composition of its parts, the ranking of tokens, and the slots that it gives each layer."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from kvbench.errors import LARGEST, counted
from kvbench.policies.allocators.allocator import required_length
from kvbench.policies.allocators.threshold import Matched, Threshold
from kvbench.policies.checks import check_choices
from kvbench.policies.composition import Budget as Budget
from kvbench.policies.composition import Composition
from kvbench.policies.needs import Needs
from kvbench.policies.observation import MOVED, Observation, State
from kvbench.policies.policy_checks import check_protected, check_question_fits, least_budget, settled
from kvbench.policies.pre_passes.lookahead import Lookahead
from kvbench.policies.pre_passes.pre_pass import TokenRating
from kvbench.policies.protections import read_by
from kvbench.policies.ranking import Ranking, half_the_bits, protected
from kvbench.policies.readers.reader import ReadPlan
from kvbench.policies.scorers.scorer import Scorer, protected_counts
from kvbench.policies.selections.fair import Fair


@dataclass(frozen=True)
class Policy(Composition):
    """A composition of parts that defines which tokens a cache keeps.

    Parts that follow from others (a scorer's pre-pass, an allocator of whole pages) are set when a policy is made.
    Raises ValueError for an invalid combination or a budget smaller than the protected tokens.
    """

    generator: ClassVar[str | None] = None
    """The import path of `generate(model, request, policy) -> Generation` (`kvbench.engine.generate`) of policies that
    another package computes, in a cache of its own; None: kvbench computes the policy."""

    def __post_init__(self) -> None:
        check_choices(self)
        given = Composition(**{one.name: getattr(self, one.name) for one in fields(Composition)})
        vars(self).update(vars(settled(given)))

    @property
    def evicts(self) -> bool:
        """Whether the policy evicts tokens."""
        return self.scorer is not None

    @property
    def decoding_evicts(self) -> bool:
        """Whether tokens are evicted while decoding."""
        return self.evicts and self.schedule.decoding_evicts

    @cached_property
    def needs(self) -> Needs:
        """The combined requirements of the parts; `window_decoding` is a number if the policy evicts."""
        if self.scorer is None:
            return Needs(model=self.store.reads_model)
        own = self.scorer.needs
        decoding = own.window if own.window_decoding is None else own.window_decoding
        found = () if self.pre_pass is None else self.pre_pass.statistics
        drafter = self.pre_pass.drafter if isinstance(self.pre_pass, Lookahead) else None
        drafting = 0 if drafter is None else drafter.needs.window
        rotates = self.schedule.rerotate
        model = own.model or rotates or (self.value is not None and self.value.needs.model) or self.store.reads_model
        return replace(
            own,
            statistics=tuple(dict.fromkeys((*own.statistics, *found, *[MOVED] * rotates))),
            window=max(own.window, self.allocator.needs.window, self.merger.needs.window, drafting),
            window_decoding=decoding if self.schedule.returns_to_budget else 0,
            model=model,
            layer=own.layer or own.kept or self.merger.needs.layer or model,
            query_heads=self._values_query_heads or self.allocator.needs.query_heads,
            reads=read_by(own, self.schedule.protection, self.pre_pass is not None),
        )

    @property
    def rates(self) -> bool:
        """Whether a pre-pass rates each token from the logits before it, so that tokens are processed one by one."""
        return isinstance(self.pre_pass, TokenRating)

    @cached_property
    def _fair_windows(self) -> Fair | None:
        """The selection that divides the scorer's window among the parts of a prompt, if there is one."""
        own = self.selection
        return own if isinstance(own, Fair) and self.scorer is not None and own.divides(self.scorer) else None

    @property
    def _values_query_heads(self) -> bool:
        return self.value is not None and (self.value.needs.query_heads or self.granularity == "layer")

    def for_example(self, run_seed: int, example: int) -> "Policy":
        """The policy for one example of a run: scorers and mergers that draw numbers per token draw others."""
        scorer = None if self.scorer is None else self.scorer.for_example(run_seed, example)
        merger = self.merger.for_example(run_seed, example)
        same = scorer is self.scorer and merger is self.merger
        return self if same else replace(self, scorer=scorer, merger=merger)

    def observe(self, observation: Observation, state: State) -> None:
        """Update the running statistics of a layer, in place."""
        assert self.scorer is not None
        self.scorer.observe(observation, state)
        if isinstance(self.pre_pass, TokenRating):
            self.pre_pass.observe(observation, state)

    def rank(self, observation: Observation, state: State) -> Ranking:
        """Score every stored token of a layer; a pure function of the observation."""
        assert self.scorer is not None
        if self._fair_windows is not None and observation.phase == "prompt":
            ranking = self._fair_windows.rank_parts(observation, state, self._rank, self.scorer)
        else:
            ranking = self._rank(self.scorer, observation, state)
        return ranking if self.selection is None else self.selection.rank(ranking)

    def _rank(self, scorer: Scorer, observation: Observation, state: State) -> Ranking:
        """The ranking of single tokens by a scorer."""
        sequences, slots = observation.sequences, observation.slots
        first, newest = protected_counts(scorer, sequences.budgets)
        stays, protection = _protected(observation, first, newest), self.schedule.protection
        named = None if protection is None else protection.mask(observation, self.schedule.spans)
        stays = stays if named is None else stays | named
        spared = scorer.spares(observation, state, stays)
        spared = named if spared is None else spared if named is None else spared | named
        stays = stays if spared is None else stays | spared
        if self.needs.evictable:
            observation.evictable = observation.occupied & ~stays
        scores = observation.scores(scorer.score, state, self.needs.keys)
        unrounded = scores if self.needs.ties and isinstance(self.allocator, Threshold | Matched) else None
        if self.needs.ties:
            scores = half_the_bits(scores)
        layer_wide = self.granularity == "layer"
        if layer_wide:
            scores = scores.mean(1, keepdim=True).expand_as(scores)
        found, tie_break = scores, None
        if self.value is not None:
            valued = self.value.score(scorer, scores, observation, state, stays, layer_wide)
            found, tie_break = half_the_bits(valued) if self.needs.ties else valued, scores
        tensors = found, tie_break, observation.positions, stays, observation.seen, spared
        key = "ranking", *map(id, (found, tie_break, stays, spared))  # budgets of one policy share one order
        ordered = slots.packed, slots.ascending
        return observation.once(key, lambda: Ranking(*tensors, *ordered, unrounded=unrounded))


def _protected(observation: Observation, first: Sequence[int], newest: Sequence[int]) -> Tensor:
    """[B,H_kv,T] bool: the stored tokens among the first and the newest positions, counts per sequence."""
    if len(set(first)) > 1 or len(set(newest)) > 1:
        return protected(observation.positions, observation.seen, first, newest)
    recent = observation.newest(newest[0])
    if first[0] and any(newest):
        return observation.once(("protected", first[0], *newest), lambda: recent | observation.first(first[0]))
    return observation.first(first[0]) if first[0] else recent


# --- how many slots a policy gives each layer -----------------------------------------------------------------------
def total_slots(policy: Policy, layers: int, length: int | None) -> int:
    """Slots per KV head over all layers for one sequence with a prompt of `length` tokens.

    A share is round(share * length * layers); without a budget, all tokens. ValueError if `length` is needed but None.
    """
    if policy.budget is None:
        return required_length(length, f"the allocator of {policy.name}") * layers
    if policy.reader is not None:
        length = required_length(length, policy.name)
        return min(read_plan(policy, length).kept, length) * layers
    if isinstance(policy.budget, int):
        return policy.budget * layers
    length = required_length(length, f"a budget that is a share of the prompt ({policy.budget})")
    return round(policy.budget * length * layers)


def layer_budgets(policy: Policy, layers: int, length: int | None, question: int = 0, begin: int = 0) -> list[int]:
    """Slots per KV head of each layer for one sequence with a prompt of `length` tokens; the sum is exact.

    question: tokens of the question, which policies with `needs.question` always keep. begin: position of the first
    token of the newest prompt. An allocator that needs
    statistics splits evenly before layers are measured.
    ValueError if a layer gets fewer slots than tokens that are always kept.
    """
    scorer, allocator = policy.scorer, policy.allocator
    assert scorer is not None
    total = total_slots(policy, layers, length)
    whole = policy.reader is not None and length is not None and total == length * layers
    if policy.budget is None or whole:  # no lower bound: a short prompt is kept whole
        return allocator.split(total, layers, length, 0)
    check_protected(policy.name, scorer, allocator, total // layers)
    budgets = allocator.split(total, layers, length, least_budget(scorer, allocator))
    assert sum(budgets) == total or not allocator.exact, "an allocator must distribute exactly the total"
    for budget in budgets:
        check_protected(policy.name, scorer, allocator, budget)
    protection, least = policy.schedule.protection, min(budgets)
    if protection is not None and length is not None:
        protection.check_fits(policy.name, least, scorer.protects(least), length, begin, policy.schedule.spans)
    if policy.needs.question:
        check_question_fits(policy.name, question, min(budgets))
    return budgets


def budget_tokens(policy: Policy, length: int) -> int:
    """The budget of a policy with a reader in tokens per KV head; all tokens for a reader with a `mass`."""
    if policy.reader is not None and policy.reader.mass is not None:
        return LARGEST
    assert policy.budget is not None
    return policy.budget if isinstance(policy.budget, int) else int(policy.budget * length)


def read_plan(policy: Policy, length: int) -> ReadPlan:
    """How decoded queries read after a prompt of `length` tokens. ValueError for a budget smaller than a page."""
    assert policy.reader is not None
    tokens = budget_tokens(policy, length)
    plan = policy.reader.plan(max(tokens, 1), length)
    if min(tokens, plan.tokens) < (1 if plan.cuts else plan.page):
        raise ValueError(
            f"{policy.name} reads pages of {counted(plan.page, 'token')}, so a budget of "
            f"{counted(tokens, 'token')} per KV head is "
            f"too small: it must be at least {2 if plan.cuts else plan.page}"
        )
    return plan
