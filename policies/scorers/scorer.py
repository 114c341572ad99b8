"""The contract of a scorer: which tokens matter."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.policies.needs import Needs, Protected
from kvbench.policies.observation import Observation, State


def group_mean(x: Tensor) -> Tensor:
    """[B,H_kv,G,...] averaged over the query heads of a group; on a CPU `mean` takes three times as long."""
    return x[:, :, 0].clone() if x.shape[2] == 1 else x.sum(2).div_(x.shape[2])


class Scorer(ABC):
    """Scores every stored token of a layer, per KV head; higher = keep. Subclasses are frozen dataclasses of knobs."""

    @property
    def needs(self) -> Needs:
        """What it reads; a class attribute where no field decides it."""
        return Needs()

    @property
    def least_budget(self) -> int:
        """The smallest budget of a layer that makes sense (tokens per KV head)."""
        return max(1, sum(self.protects(1)))

    def protects(self, budget: int) -> Protected:
        """How many first and newest positions are always kept at this budget (tokens per KV head)."""
        return Protected()

    def observe(self, observation: Observation, state: State) -> None:  # noqa: B027 - most scorers keep no statistics
        """Take this step's queries into the running statistics, in place. Called once a step, before `score`.

        Statistics (`needs.statistics`) start at 0 when a token enters and leave with it.
        """

    def spares(self, observation: Observation, state: State, protected: Tensor) -> Tensor | None:
        """Tokens that stay for another reason than their place, bool [B,H_kv,T]; `protected`: first and newest.

        Never more than the budget has room for. None: there are none.
        """
        return None

    @abstractmethod
    def score(self, observation: Observation, state: State) -> Tensor:
        """[B,H_kv,T] float32, higher = keep. Empty slots may hold anything finite; the caller masks them.

        NaN is an error on a CPU (`Ranking.broken`), unless its token stays in any case.
        """

    def selected(self, observation: Observation, kept: Tensor) -> None:  # noqa: B027 - most scorers do not look back
        """Told after each eviction which slots stay, bool [B,H_kv,T], where `needs.kept`."""


def protected_counts(scorer: Scorer, budgets: Sequence[int]) -> tuple[list[int], list[int]]:
    """How many first and how many newest tokens always stay, for each sequence's budget of a layer."""
    protected = [scorer.protects(budget) for budget in budgets]
    return [some.first for some in protected], [some.newest for some in protected]


class AttentionScorer(Scorer):
    """A scorer whose raw score exists per query head and is averaged over the group, then finished per KV head."""

    @abstractmethod
    def raw(self, observation: Observation, state: State) -> Tensor:
        """[B,H_kv,G,T] (or G' = 1 where the statistics were averaged over the group already) float32."""

    def finish(self, raw: Tensor, observation: Observation) -> Tensor:
        """What happens to [B,H_kv,...,T] after the group mean, e.g. pooling over neighbours."""
        return raw

    def score(self, observation: Observation, state: State) -> Tensor:
        return self.finish(group_mean(self.raw(observation, state)), observation)

    def score_query_heads(self, observation: Observation, state: State) -> Tensor:
        """The same per query head, [B,H_kv,G,T]."""
        raw = self.raw(observation, state)
        return torch.stack([self.finish(head, observation) for head in raw.unbind(2)], dim=2)
