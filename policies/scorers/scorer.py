"""The contract of a scorer: which tokens matter."""

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.policies.observation import Observation, State


def group_mean(x: Tensor) -> Tensor:
    """[B,H_kv,G,...] averaged over the query heads of a group; on a CPU `mean` takes three times as long."""
    return x[:, :, 0].clone() if x.shape[2] == 1 else x.sum(2).div_(x.shape[2])


class Scorer(ABC):
    """Scores every stored token of a layer, per KV head; higher = keep. Subclasses are frozen dataclasses of knobs."""

    ranks_by_position: ClassVar[bool] = False
    """True where the score is only the place in the text: nothing a value-aware wrapper could weigh."""

    whole_prompt: ClassVar[bool] = False
    """True where the score has a meaning at the end of the prompt only, so that blocks are refused."""

    needs_surprisal: ClassVar[bool] = False
    """True where it reads -log p of the tokens, which is known only after all layers: a prompt is then evicted late."""

    never_negative: ClassVar[bool] = False
    """True where no score is below 0."""

    ties: ClassVar[bool] = False
    """True where equal tokens score the same but for rounding: their scores, and what a value-aware wrapper makes of
    them, are then rounded to half the bits, so that they tie."""

    reads_layer: ClassVar[bool] = False
    """True where scores depend on which layer it is, so that layers cannot be scored side by side."""

    reads_newest_row: ClassVar[bool] = False
    """True where decoding reads the attention of the newest query: the step then takes its weights from there."""

    sums_up: ClassVar[Literal["column_sums", "moments"] | None] = None
    """What `observe` reads of all of a prompt's queries; the attention itself may then be computed on the way."""

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of the running statistics it keeps per slot; they start at 0 when a token enters and leave with it."""
        return ()

    @property
    def queries_needed(self) -> int:
        """How many of the newest queries `score` looks through (its observation window)."""
        return 0

    @property
    def queries_decoding(self) -> int:
        """How many of them it looks through while decoding beside the newest, which is at hand; no more are held."""
        return self.queries_needed

    @property
    def least_budget(self) -> int:
        """The smallest budget of a layer that makes sense (tokens per KV head)."""
        return max(1, self.protects_first(1) + self.protects_newest(1))

    def protects_first(self, budget: int) -> int:
        """How many first positions are always kept at this budget (tokens per KV head, inside the budget)."""
        return 0

    def protects_newest(self, budget: int) -> int:
        """How many newest positions are always kept at this budget (tokens per KV head, inside the budget)."""
        return 0

    def observe(self, observation: Observation, state: State) -> None:  # noqa: B027 - most scorers keep no statistics
        """Take this step's queries into the running statistics, in place. Called once a step, before `score`."""

    @property
    def observes(self) -> bool:
        """Whether it wants to see every step."""
        return type(self).observe is not Scorer.observe

    def selected(self, observation: Observation, kept: Tensor) -> None:  # noqa: B027 - most scorers do not look back
        """Told which slots of the observation stay, bool [B,H_kv,T], after each eviction."""

    @property
    def looks_back(self) -> bool:
        """Whether it wants to be told."""
        return type(self).selected is not Scorer.selected

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

    @property
    def scores_query_heads(self) -> bool:
        """Whether `score_query_heads` exists: a score that reads keys or values only is one per KV head."""
        return False

    def score_query_heads(self, observation: Observation, state: State) -> Tensor:
        """The same per query head, [B,H_kv,G,T]; only called where `scores_query_heads`."""
        raise NotImplementedError


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

    @property
    def scores_query_heads(self) -> bool:
        return True

    def score_query_heads(self, observation: Observation, state: State) -> Tensor:
        raw = self.raw(observation, state)
        return torch.stack([self.finish(head, observation) for head in raw.unbind(2)], dim=2)
