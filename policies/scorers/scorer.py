"""The interface of a scorer, which computes the importance of every stored token."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from kvbench.policies.needs import Needs, Protected
from kvbench.policies.observation import Memory, Observation, State
from kvbench.policies.pre_passes.pre_pass import PrePass


def group_mean(x: Tensor) -> Tensor:
    """[B,H_kv,G,...] averaged over the query heads of a group; on a CPU `mean` takes three times as long."""
    return x[:, :, 0].clone() if x.shape[2] == 1 else x.sum(2).div_(x.shape[2])


class Scorer(ABC):
    """Scores every stored token of a layer, per KV head; higher = keep. Subclasses are frozen dataclasses."""

    @property
    def needs(self) -> Needs:
        """The scorer's inputs; a class attribute unless fields change them."""
        return Needs()

    @property
    def pre_pass(self) -> PrePass | None:
        """Extra forward passes that fill `state` for this scorer; a class attribute unless fields change them."""
        return None

    def protects(self, budget: int) -> Protected:
        """Numbers of first and newest positions that are always kept at this budget (tokens per KV head).

        Those at a budget of 1 determine the smallest possible budget of a layer.
        """
        return Protected()

    def observe(self, observation: Observation, state: State) -> None:  # noqa: B027 - most scorers keep no statistics
        """Update the running statistics with this step's queries, in place. Called once a step, before `score`.

        Statistics (`needs.statistics`) are 0 when a token is appended and are evicted with it.
        """

    def spares(self, observation: Observation, state: State, protected: Tensor) -> Tensor | None:
        """Tokens to keep regardless of score and position, bool [B,H_kv,T]; `protected`: the first and newest tokens.

        Protected and spared tokens together never exceed the budget. None: no token is spared.
        """
        return None

    @abstractmethod
    def score(self, observation: Observation, state: State) -> Tensor:
        """[B,H_kv,T] float32, higher = keep. Empty slots may have any finite score; the caller masks them.

        NaN raises an error on a CPU (`Ranking.broken`), unless the token is protected.
        """

    def for_example(self, run_seed: int, example: int) -> Self:
        """The scorer for one example of a run; only scorers with random numbers differ between examples."""
        return self

    def forget(self, memory: Memory) -> None:  # noqa: B027 - most scorers keep no memory
        """Free what only evictions of this prompt read. Called at its end if decoding evicts nothing (decode=grow).

        Another prompt of the same cache begins with new statistics.
        """

    def selected(self, observation: Observation, kept: Tensor) -> None:  # noqa: B027 - most scorers ignore it
        """Called after each eviction with the kept slots, bool [B,H_kv,T], if `needs.kept`."""


def protected_counts(scorer: Scorer, budgets: Sequence[int]) -> tuple[list[int], list[int]]:
    """Numbers of first and of newest tokens that are always kept, for each sequence's budget of a layer."""
    protected = [scorer.protects(budget) for budget in budgets]
    return [some.first for some in protected], [some.newest for some in protected]


class AttentionScorer(Scorer):
    """A scorer with raw scores per query head, which are averaged over the group, then finished per KV head."""

    @abstractmethod
    def raw(self, observation: Observation, state: State) -> Tensor:
        """[B,H_kv,G,T] (or G' = 1 if the statistics are already averaged over the group) float32."""

    def finish(self, raw: Tensor, observation: Observation) -> Tensor:
        """Processes [B,H_kv,...,T] after the group mean, e.g. by pooling over neighbours."""
        return raw

    def score(self, observation: Observation, state: State) -> Tensor:
        return self.finish(group_mean(self.raw(observation, state)), observation)

    def score_query_heads(self, observation: Observation, state: State) -> Tensor:
        """`score` per query head, [B,H_kv,G,T]."""
        raw = self.raw(observation, state)
        return torch.stack([self.finish(head, observation) for head in raw.unbind(2)], dim=2)
