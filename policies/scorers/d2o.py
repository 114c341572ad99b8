"""D2O's eviction: keep sinks, the most important tokens and the recent tokens."""

from dataclasses import dataclass
from typing import Literal

from kvbench.policies.checks import count_or, whole_number
from kvbench.policies.needs import Protected
from kvbench.policies.scorers.attention_sums import AttentionSums


@dataclass(frozen=True)
class HeavyAndRecent(AttentionSums):
    """Keep the first `sinks` tokens; divide the other slots n : m between the most attended and the newest tokens.

        s_j = 1 / G sum_(h in "group") sum_(q >= j) A_(h,q,j)
        M = max(1, floor((S - sinks) * m / (n + m))), N = S - sinks - M

    S: the slots of the layer, N of them for important tokens and M for the newest.

    sinks: number of first tokens that are always kept. n: parts for important tokens. m: parts for the newest tokens.
    recent: a fixed number of newest tokens instead of a share. sinks_inside: count the sinks as important tokens, as
    the released code does: the recent window is then floor(S * m / (n + m)).
    Source: Wan et al. 2024, arXiv 2406.13035, eq. 6-8 and section 5.1 (N:M = 3:1); the four sinks follow its code.
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

    def protects(self, budget: int) -> Protected:
        if self.recent != "share":
            return Protected(self.sinks, self.recent, others=1)
        shared = budget if self.sinks_inside else budget - self.sinks
        recent = max(1, min(shared * self.m // (self.n + self.m), budget - self.sinks))
        return Protected(self.sinks, recent, others=1)
