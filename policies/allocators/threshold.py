"""A threshold on scores instead of a budget: the data decide how many tokens a head keeps.

Shapes: B batch, H KV heads, T slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from kvbench.errors import ConfigError
from kvbench.policies.allocators.allocator import Allocator, even_shares
from kvbench.policies.checks import LARGEST, number, whole_number
from kvbench.policies.ranking import Ranking, protected
from kvbench.policies.schedule import Schedule
from kvbench.policies.scorers.kvzap import KVzap
from kvbench.policies.scorers.scorer import Scorer


@dataclass(frozen=True)
class Threshold(Allocator):
    """Each KV head keeps the tokens that score at least tau, and the newest `window` tokens. There is no budget.

        j "stays if" s_j >= tau "or" j >= T - w

    The score of a token must never change (`Needs.fixed_scores`), so that one pass over the tokens suffices and nothing
    is sorted. A token is evicted once it leaves the window. With decode=threshold this continues while decoding; with
    decode=grow all decoded tokens stay.

    tau: the threshold. keep: instead of tau, the share of tokens to keep on the calibration's texts, if the scorer's
    file has percentiles of its scores; the share on other texts differs. window: number of newest tokens that stay.
    Source: Jegou et al. 2026, arXiv 2601.07891 (KVzap) and kvpress's DMSPress.
    """

    per_head: ClassVar[bool] = True
    sets_budget: ClassVar[bool] = True

    tau: float | None = None
    keep: float | None = None
    window: int = 128

    def __post_init__(self) -> None:
        for name, value, bounds in (("tau", self.tau, (-LARGEST,)), ("keep", self.keep, (0, 1))):
            if value is not None:
                number(name, value, *bounds)
        if self.tau is None and self.keep is None:
            raise ConfigError("tau", None, "the least score of a token that stays, such as policy.allocator.tau=-4")
        whole_number("window", self.window, 0)

    @property
    def exact(self) -> bool:
        return False

    def split(self, total: int, layers: int, length: int | None, floor: int) -> list[int]:
        return even_shares(total, layers)

    def marked(self, ranking: Ranking) -> Ranking:
        """The ranking with all tokens that stay, and only these, protected."""
        assert self.tau is not None, "set by `with_threshold`"
        near = protected(ranking.positions, ranking.seen, [0], [self.window])
        return replace(ranking, protected=ranking.occupied & ((ranking.scores >= self.tau) | ranking.protected | near))

    def heads(self, layer: int, ranking: Ranking, budgets: Sequence[int]) -> Tensor:
        return self.marked(ranking).protected.sum(-1)


def with_threshold(name: str, own: Allocator, scorer: Scorer, schedule: Schedule, other: object) -> Allocator:
    """The allocator with its threshold, which `keep` takes from the scorer's percentiles.

    other: a part that changes scores. ValueError if a score may change after a token was kept, or for decode=evict.
    """
    if not isinstance(own, Threshold):
        if schedule.decode == "threshold":
            raise ConfigError("decode", "threshold", why=f"needs the allocator Threshold: {name} has a budget")
        return own
    if not scorer.needs.fixed_scores or other is not None:
        part = scorer if other is None else other
        raise ValueError(
            f"{name} evicts below a threshold, but its {type(part).__name__} gives a token another score when other "
            "tokens come or go: use scores that never change, such as knorm, qfilters or kvzap"
        )
    if schedule.decode == "evict":
        raise ConfigError("decode", "evict", why="needs a budget, which a threshold replaces: use threshold or grow")
    if schedule.decode == "threshold" and scorer.needs.whole_prompt:
        raise ConfigError("decode", "threshold", why=f"needs scores of decoded tokens, which {name} has not: use grow")
    if own.keep is None:
        return own
    if not isinstance(scorer, KVzap):
        raise ConfigError("keep", own.keep, why="needs percentiles of scores, which only a gate's file has: use tau")
    return replace(own, tau=scorer.score_at(1 - own.keep))
