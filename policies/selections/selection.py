"""The interface of a selection, which turns the ranking of a layer's tokens into the set of kept tokens."""

from abc import ABC, abstractmethod

from kvbench.policies.ranking import Ranking


class Selection(ABC):
    """Ranks units of several tokens, such as chunks. Subclasses are frozen dataclasses of parameters.

    Tokens are kept in the order of the ranking until the budget is used: protected tokens first, then the highest
    scores; ties go to the higher `tie_break`, then to the lower position. A selection returns another ranking of the
    same slots. Budgets are therefore exact for every allocator, in prefill and decoding.
    """

    @abstractmethod
    def rank(self, ranking: Ranking) -> Ranking:
        """Compute the ranking for eviction from the ranking by individual scores; a pure function."""
