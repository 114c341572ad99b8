"""The contract of a selection: how the ranking of a layer's tokens becomes the set that is kept."""

from abc import ABC, abstractmethod

from kvbench.policies.ranking import Ranking


class Selection(ABC):
    """Ranks units of several tokens, such as chunks. Subclasses are frozen dataclasses of their knobs.

    A budget cuts a ranking at its last token: protected tokens stay, then the highest scores; of equal scores the
    higher `tie_break`, then the lower position. A selection makes another ranking of the same slots. So each budget is
    met to the token, whoever divides it over layers and heads, in a prompt as while decoding.
    """

    @abstractmethod
    def rank(self, ranking: Ranking) -> Ranking:
        """The ranking by which tokens are kept, from the one by their own scores: a pure function."""
