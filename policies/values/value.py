"""The interface of a value-aware wrapper, which combines the scores of any scorer with the values."""

from abc import ABC, abstractmethod

from torch import Tensor

from kvbench.policies.needs import Needs
from kvbench.policies.observation import Observation, State
from kvbench.policies.scorers.scorer import Scorer


class ValueAware(ABC):
    """Wraps a scorer. Subclasses are frozen dataclasses of parameters."""

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

        scores [B,H_kv,T]: the scorer's scores. protected, bool [B,H_kv,T]: tokens that are always kept. layer_wide: all
        heads of the layer keep one token set, so every head gets the same scores.
        """

    @property
    def needs(self) -> Needs:
        """The wrapper's inputs, such as statistics per query head. window: the least window of its scorer."""
        return Needs()
