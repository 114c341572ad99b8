"""The contract of a value-aware wrapper: it combines the scores of any scorer with the values."""

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

        scores [B,H_kv,T]: those of the scorer. protected, bool [B,H_kv,T]: tokens that are always kept. layer_wide: all
        heads of the layer keep one token set, so every head gets an equal row.
        """

    @property
    def needs(self) -> Needs:
        """What it reads of the scorer: statistics and scores per query head, or per KV head."""
        return Needs()
