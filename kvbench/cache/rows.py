"""One eviction: rows of one rule, each a layer of a sequence, that lose one token, a block, or what a prompt exceeds.

Shapes: n rows, H_kv KV heads, T slots, D head dim.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor

from kvbench.policies.latents import LatentObservation
from kvbench.policies.observation import Observation, State
from kvbench.policies.policy import Policy
from kvbench.policies.ranking import Ranking


class Rows(ABC):
    """observation: of all rows. state: their running statistics [n,H_kv,T,G'] by name."""

    policy: Policy
    observation: Observation
    state: State

    def observe(self) -> None:
        """Let the scorer update its running statistics and its memory."""
        if self.state or self.policy.needs.memory:
            self.policy.observe(self.observation, self.state)
            self.store()

    def rank(self) -> Ranking:
        """The order in which the policy keeps tokens."""
        ranking = self.policy.rank(self.observation, self.state)
        self.note_nan(ranking)
        return ranking

    def is_due(self) -> bool:
        """Whether any row has to evict now; called once, because the decision is noted for the audit."""
        return True

    @abstractmethod
    def store(self) -> None:
        """Write the statistics and the scorer's memory back."""

    @abstractmethod
    def note_nan(self, ranking: Ranking) -> None:
        """Note rows with a NaN score. The call continues for the others and ends with an error."""

    @abstractmethod
    def free(self, ranking: Ranking) -> None:
        """Merge the tokens of the lowest rank into others, if the policy merges, and free their slots."""


def evict(rows: Rows) -> None:
    """Observe, and evict if that is due."""
    rows.observe()
    if rows.is_due():
        rows.free(rows.rank())


class LazyObservation(Observation):
    """An observation whose keys and values are made on first use, because few scorers use both.

    vectors: makes them from their name. layer is missing if it combines several layers.
    """

    def __init__(self, vectors: Callable[[str], Tensor], **fields: Any) -> None:  # noqa: ANN401
        self.__dict__.update({"known": {}, "memory": {}, "shared": {}, "_vectors": vectors}, **fields)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        """Called for a field that was not made yet."""
        if name == "layer":
            raise AttributeError("several layers are scored at once: a scorer that uses the layer needs needs.layer")
        if name not in ("keys", "values"):
            raise AttributeError(f"an observation has no {name}")
        found = self.__dict__[name] = self._vectors(name)
        return found


class LazyLatents(LazyObservation, LatentObservation):
    """Such an observation of layers that store latents."""
