"""D2O's eviction: sinks, the most important tokens, and the recent ones."""

from dataclasses import dataclass
from typing import Literal

from kvbench.policies.checks import count_or, whole_number
from kvbench.policies.needs import Protected
from kvbench.policies.scorers.attention_sums import AttentionSums


@dataclass(frozen=True)
class HeavyAndRecent(AttentionSums):
    """Keep `sinks` first tokens; of the other slots n parts for the tokens of most attention, m for the newest.

        s_j = 1 / G sum_(h in "group") sum_(q >= j) A_(h,q,j)
        M = max(1, floor((S - sinks) * m / (n + m))), N = S - sinks - M

    S: the slots of the layer, N of them for important tokens and M for the newest.

    sinks: first tokens, always kept. n: parts for the important. m: parts for the newest. recent: a fixed number of
    newest tokens instead of a share. sinks_inside: count the sinks among the important ones, as the released code does:
    the recent window is then floor(S * m / (n + m)).
    Source: Wan et al. 2024, arXiv 2406.13035, eq. 6-8 and section 5.1 (N:M = 3:1); four sinks are those of its code.
    """

    sinks: int = 4
    n: int = 3
    m: int = 1
    recent: int | Literal["share"] = "share"
    sinks_inside: bool = False

    def __post_init__(self) -> None:
        whole_number("sinks", self.sinks, 0)
        whole_number("n", self.n, 0)
        whole_number("m", self.m, 1)
        count_or("share", "recent", self.recent, 1)

    @property
    def least_budget(self) -> int:
        """Sinks, one important token and the recent window (at least one token)."""
        return self.sinks + 1 + (1 if self.recent == "share" else self.recent)

    def protects(self, budget: int) -> Protected:
        if self.recent != "share":
            return Protected(self.sinks, self.recent)
        shared = budget if self.sinks_inside else budget - self.sinks
        return Protected(self.sinks, max(1, min(shared * self.m // (self.n + self.m), budget - self.sinks)))
