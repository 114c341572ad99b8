"""A threshold on scores instead of a budget: the data decide how many tokens a head keeps.

Shapes: B batch, H KV heads, T slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.errors import ConfigError
from kvbench.policies.allocators.allocator import Allocator, JointAllocator, even_shares
from kvbench.policies.allocators.global_threshold import GlobalThreshold
from kvbench.policies.checks import LARGEST, check_choices, number, whole_number
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
    matched: a control instead of the threshold: as many tokens as it would keep of this prompt, as the same budget for
    every head (`uniform`) or as the best of all heads (`global`).
    Source: Jegou et al. 2026, arXiv 2601.07891 (KVzap) and kvpress's DMSPress.
    """

    per_head: ClassVar[bool] = True
    sets_budget: ClassVar[bool] = True

    tau: float | None = None
    keep: float | None = None
    window: int = 128
    matched: Literal["none", "uniform", "global"] = "none"

    def __post_init__(self) -> None:
        check_choices(self)
        for name, value, bounds in (("tau", self.tau, (-LARGEST, LARGEST)), ("keep", self.keep, (0, 1))):
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
        ranking = self.with_window(ranking)
        scores = ranking.scores if ranking.unrounded is None else ranking.unrounded
        return replace(ranking, protected=ranking.protected | (ranking.occupied & (scores >= self.tau)))

    def with_window(self, ranking: Ranking) -> Ranking:
        """The ranking with the newest `window` tokens protected too."""
        near = protected(ranking.positions, ranking.seen, [0], [self.window])
        return replace(ranking, protected=ranking.protected | near)

    def heads(self, layer: int, ranking: Ranking, budgets: Sequence[int]) -> Tensor:
        return self.marked(ranking).protected.sum(-1)


@dataclass(frozen=True)
class Matched(JointAllocator):
    """A control for a threshold: the same scores and the size that it chose for this example, divided by a budget.

        b = "round"(1 / (L H) sum_(l,h) k_(l,h))

    k_(l,h): the tokens that the threshold keeps in head h of layer l of the prompt. What the threshold gains over equal
    budgets b is due to its heads; what equal budgets b of each example gain over one budget for all examples is due to
    the examples. Decoded tokens all stay.

    A policy sets it for `Threshold(matched=...)`, whose fields it has. matched: `uniform`, every head keeps its best b
    tokens, or `global`, the best b L H tokens of all heads.
    Source: ours.
    """

    sets_budget: ClassVar[bool] = True

    tau: float | None
    keep: float | None
    window: int
    matched: Literal["uniform", "global"]

    @property
    def exact(self) -> bool:
        return False

    @property
    def _threshold(self) -> Threshold:
        return Threshold(self.tau, self.keep, self.window)

    def rank_of_all(self, rankings: Sequence[Ranking]) -> Sequence[Ranking]:
        return [self._threshold.with_window(ranking) for ranking in rankings]

    def heads_of_all(self, rankings: Sequence[Ranking], budgets: Sequence[Sequence[int]]) -> list[Tensor]:
        counts = [self._threshold.heads(layer, ranking, []) for layer, ranking in enumerate(rankings)]  # [B,H] each
        mean = torch.stack([x.to(counts[0].device) for x in counts]).double().mean((0, 2)).round().long()  # [B]
        if self.matched == "uniform":
            return [mean.to(count.device)[:, None].expand_as(count) for count in counts]
        return GlobalThreshold().heads_of_all(rankings, [mean.tolist()] * len(rankings))


def with_threshold(name: str, own: Allocator, scorer: Scorer, schedule: Schedule, other: object) -> Allocator:
    """The allocator with its threshold, which `keep` takes from the scorer's percentiles.

    other: a part that changes scores. ValueError if a score may change after a token was kept, or for decode=evict.
    """
    if isinstance(own, Matched):
        return own
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
    if schedule.returns_to_budget:
        raise ConfigError("decode", "evict", why="needs a budget, which a threshold replaces: use threshold or grow")
    if schedule.decode == "threshold" and scorer.needs.whole_prompt:
        raise ConfigError("decode", "threshold", why=f"needs scores of decoded tokens, which {name} has not: use grow")
    if own.matched != "none":
        if schedule.decoding_evicts:
            raise ConfigError("decode", schedule.decode, why=f"cannot be combined with matched={own.matched}: use grow")
        base = with_threshold(name, replace(own, matched="none"), scorer, schedule, other)
        assert isinstance(base, Threshold)
        return Matched(base.tau, base.keep, base.window, own.matched)
    if own.keep is None:
        return own
    if not isinstance(scorer, KVzap):
        raise ConfigError("keep", own.keep, why="needs percentiles of scores, which only a gate's file has: use tau")
    return replace(own, tau=scorer.score_at(1 - own.keep))
