"""K-VEC: window scores corrected so that heads and layers together cover more of the prompt.

Shapes: B batch, H KV heads, G query heads per KV head, T tokens of the prompt, O and O' lengths of the two observation
windows.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.kernels.selection import select
from kvbench.policies.checks import check_choices, number, whole_number
from kvbench.policies.constants import on_device
from kvbench.policies.needs import Needs, Protected
from kvbench.policies.observation import Observation, State
from kvbench.policies.scorers.pooling import check_kernel, smooth
from kvbench.policies.scorers.scorer import Scorer, group_mean

COVERED = "kvec_covered"
INFINITE = (
    "gives the tokens that it always keeps an infinite score, which a value-aware wrapper cannot weigh: use "
    "scorer.preserve=literal"
)


def _ahead(observation: Observation) -> int:
    """Number of queries of a lookahead."""
    return 0 if observation.window is None else observation.window.ahead


def _in_place(observation: Observation) -> bool:
    """Whether slot i holds token i in all heads and layers: a first prompt before its eviction."""
    return observation.slots.whole and observation.phase != "decode"


def _any_head(kept: Tensor, observation: Observation) -> Tensor:
    """Tokens that at least one head keeps, [B,1,T] or, if heads differ, by position [B,1,P]; kept: bool [B,H,T]."""
    if _in_place(observation):
        return kept.any(1, keepdim=True)
    length = int(observation.seen.max())
    places = observation.positions.masked_fill(~kept, length).long().flatten(1)
    return kept.new_zeros(len(kept), length + 1).scatter_(1, places, True)[:, None, :length]


@dataclass(frozen=True)
class KVec(Scorer):
    """SnapKV's window mean with two corrections; the whole prompt is scored once and decoding grows.

        P_(h,j) = mean_q A_(h,q,j), q in "window (wider for the least focused heads)"
        I_j = mean_q max_h A_(h,q,j)
        s_(h,j) = P_(h,j) + lambda * I_j * (1 - n_j / (l + 1)), n_j = "layers below l that kept j"

    Across heads: the `delta` least focused heads (with the smallest differences of scores) are scored again with the
    wider window `extended`. Across layers: a token's bonus is its importance I times the share of the layers up to this
    one that did not keep it. Each head's best floor(beta * budget) candidates by score without the bonus are always
    kept. With decode=evict, and in a later prompt, stored tokens are scored in the same way and matched by position
    (ours).

    window: number of newest queries that score; these tokens are always kept. extended: number of queries that score
    the least focused heads. delta: number of least focused heads, at most all KV heads. lam: weight of the bonus. beta:
    share of the budget that is filled by score alone. criterion: the least focused heads have the lowest `std` or the
    highest `entropy`. kernel: number of pooled neighbours. pool: max over `kernel` neighbours `before` the bonus,
    `after` it, or `none`. preserve: `forced`, or the `literal` score of 1.0, which a bonus may exceed.
    Source: K-VEC (anonymous submission), equations 8-16 and algorithm 1; pooling and window follow SnapKV.
    """

    window: int = 16
    extended: int = 32
    delta: int = 3
    lam: float = 1.0
    beta: float = 0.25
    kernel: int = 7
    pool: Literal["before", "after", "none"] = "before"
    criterion: Literal["std", "entropy"] = "std"
    preserve: Literal["forced", "literal"] = "forced"

    def __post_init__(self) -> None:
        whole_number("window", self.window, 1)
        whole_number("extended", self.extended, self.window)
        whole_number("delta", self.delta, 0)
        number("lam", self.lam, 0)
        number("beta", self.beta, 0, 1)
        check_kernel(self.kernel)
        check_choices(self)

    @property
    def needs(self) -> Needs:
        forces = self.preserve == "forced" and self.beta > 0
        return Needs(window=self.extended, layer=True, kept=True, whole_prompt=True, unweighable=INFINITE * forces)

    def protects(self, budget: int) -> Protected:
        return Protected(newest=self.window)

    def score(self, observation: Observation, state: State) -> Tensor:
        recent_sums, wide_sums, importance = self._sums(observation)
        queries = self._queries(observation)
        longest = (n + _ahead(observation) for n in (self.extended, self.window))
        wide, narrow = (queries.clamp(max=n)[:, None, None] for n in longest)
        candidates = observation.occupied & ~observation.newest(self.window)
        scores = recent_sums / narrow
        scores = torch.where(self._least_focused(scores, candidates)[..., None], wide_sums / wide, scores)
        if self.pool == "before":
            scores = smooth(scores, observation, self.window, self.kernel, "max")
        importance, covered = importance / narrow, self._covered(observation)
        raised = scores + self.lam * importance * (1 - covered / (observation.layer + 1))
        if self.pool == "after":
            raised = smooth(raised, observation, self.window, self.kernel, "max")
        return self._preserving(raised, scores, candidates, observation)

    def _sums(self, observation: Observation) -> tuple[Tensor, Tensor, Tensor]:
        """A head's attention summed over either window, [B,H,T] each, and the largest head's over the first."""
        largest = observation.window_largest(self.window) if _in_place(observation) else None
        if largest is not None:
            return observation.window_mean(self.window), observation.window_mean(self.extended), largest[:, None]
        rows = group_mean(observation.window_attention(self.extended))  # [B,H,<=O',T], rows of padding are 0
        recent = rows[:, :, -self.window - _ahead(observation) :]
        return recent.sum(2), rows.sum(2), self._importance(recent, observation)

    def selected(self, observation: Observation, kept: Tensor) -> None:
        """Count this layer for every token that at least one of its heads keeps."""
        covered, now = self._so_far(observation), _any_head(kept, observation).float()
        observation.shared[COVERED] = now if covered is None else covered + now

    def _so_far(self, observation: Observation) -> Tensor | None:
        """Number of earlier layers that keep each token, [B,1,T] or by position [B,1,P]; None in the first layer."""
        covered = observation.shared.get(COVERED) if observation.layer else None
        if covered is None:
            return None
        covered = covered.to(observation.positions.device)  # layers may be on several devices
        if _in_place(observation):
            return covered
        return F.pad(covered, (0, int(observation.seen.max()) - covered.shape[-1]))

    def _importance(self, recent: Tensor, observation: Observation) -> Tensor:
        """The largest head's attention summed over the window: [B,H,W,T] -> [B,1 or H,T]."""
        if _in_place(observation):
            return recent.amax(1, keepdim=True).sum(2)
        places = observation.positions.clamp(min=0).long()[:, :, None].expand_as(recent)  # heads hold different tokens
        batch, _, window, _ = recent.shape
        largest = recent.new_zeros(batch, window, int(observation.seen.max()))
        largest.scatter_reduce_(2, places.transpose(1, 2).flatten(2), recent.transpose(1, 2).flatten(2), "amax")
        return largest.sum(1, keepdim=True).expand(-1, recent.shape[1], -1).gather(-1, places[:, :, 0])

    def _covered(self, observation: Observation) -> Tensor:
        """Number of earlier layers that keep each slot's token: [B,1 or H,T]."""
        covered, positions = self._so_far(observation), observation.positions
        if covered is None:
            return positions.new_zeros(positions.shape, dtype=torch.float32)
        if _in_place(observation):
            return covered
        return covered.expand(-1, positions.shape[1], -1).gather(-1, positions.clamp(min=0).long())

    def _queries(self, observation: Observation) -> Tensor:
        """Number of queries in the windows, [B]: limited by the queries seen so far, and fewer in a later prompt."""
        window = observation.window
        return observation.seen if window is None else (window.positions >= 0).sum(-1)

    def _least_focused(self, scores: Tensor, candidates: Tensor) -> Tensor:
        """The `delta` heads to score again, bool [B,H]; ties go to the lower head."""
        counted = candidates.to(scores.dtype)
        number = counted.sum(-1).clamp(min=1)
        if self.criterion == "std":
            mean = (scores * counted).sum(-1) / number
            focus = ((scores - mean[..., None]).square() * counted).sum(-1) / number
        else:
            shares = scores * counted
            shares = shares / shares.sum(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)
            focus = torch.special.xlogy(shares, shares).sum(-1)
        order = focus.argsort(dim=-1, stable=True)[:, : self.delta]
        return torch.zeros_like(focus, dtype=torch.bool).scatter_(-1, order, True)

    def _preserving(self, raised: Tensor, scores: Tensor, candidates: Tensor, observation: Observation) -> Tensor:
        """`raised` with each head's best candidates by `scores` set to infinity, or to the literal 1.0 of the paper."""
        counts = [min(int(self.beta * budget), budget - self.window) for budget in observation.sequences.budgets]
        most = on_device(tuple(counts), scores.device)[:, None].expand(scores.shape[:2])
        among = observation.positions.masked_fill(~candidates, -1)
        best = select(scores, None, among, torch.zeros_like(candidates), most)
        return raised.masked_fill(best, torch.inf if self.preserve == "forced" else 1.0)
