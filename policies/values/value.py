"""The contract of a value-aware wrapper: it turns the scores of any scorer into scores that know the values."""

from abc import ABC, abstractmethod

from torch import Tensor

from kvbench.policies.needs import Needs
from kvbench.policies.observation import Observation, State
from kvbench.policies.scorers.scorer import Scorer


class ValueAware(ABC):
    """Wraps a scorer. Subclasses are frozen dataclasses of their knobs."""

    @abstractmethod
    def score(
        self,
        scorer: Scorer,
        scores: Tensor,
        observation: Observation,
        state: State,
        protected: Tensor,
        layer_wide: bool,
    ) -> Tensor:
        """Value-aware scores [B,H_kv,T] float32, higher = keep.

        scores [B,H_kv,T] are what the scorer gave. protected [B,H_kv,T] bool marks tokens that stay in any case. With
        `layer_wide` one token set serves all heads of the layer, so every head gets the same row.
        """

    @property
    def needs(self) -> Needs:
        """What it reads of the scorer: statistics and scores per query head, or per KV head."""
        return Needs()
