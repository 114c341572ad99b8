"""K-VEC: window scores corrected so that heads and layers together cover more of the prompt.

Shapes: B batch, H KV heads, G query heads per KV head, T tokens of the prompt, O and O' the two observation windows.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.policies.observation import Observation, State
from kvbench.policies.scorers.scorer import Scorer

COVERED = "kvec_covered"


@dataclass(frozen=True)
class KVec(Scorer):
    """SnapKV's window mean with two corrections; decoding grows, only the whole prompt is scored.

    Across heads: the `delta` heads whose scores differ least (the least focused) are scored again through the wider
    window `extended`. Across layers: a token's bonus is `lam` times its importance (largest head, mean over the window)
    times the share of the layers so far, this one included, that did not keep it. Each head's best floor(beta * budget)
    candidates by score before the bonus stay in any case.

    window: queries that score, and newest tokens always kept. criterion: the least focused heads have the lowest `std`
    or the highest `entropy`. pool: max over `kernel` neighbours `before` the bonus, `after` it, or `none`.
    preserve: `forced`, or the `literal` score of 1.0, which a bonus may exceed. delta is capped at the KV heads.
    Source: K-VEC (anonymous submission), equations 8-16 and algorithm 1; pooling and window are SnapKV's.
    """

    whole_prompt: ClassVar[bool] = True

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
        if self.window < 1 or self.extended < self.window:
            raise ValueError(f"need 1 <= window <= extended queries, got {self.window} and {self.extended}")
        if self.delta < 0 or self.lam < 0 or not 0 <= self.beta <= 1:
            raise ValueError(
                f"need delta >= 0, lam >= 0 and beta between 0 and 1, got {self.delta}, {self.lam} and {self.beta}"
            )
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"kernel must be an odd number of tokens, got {self.kernel}")
        for field, allowed in (
            ("pool", ("before", "after", "none")),
            ("criterion", ("std", "entropy")),
            ("preserve", ("forced", "literal")),
        ):
            if getattr(self, field) not in allowed:
                raise ValueError(f"{field} must be one of {', '.join(allowed)}, got {getattr(self, field)!r}")

    @property
    def queries_needed(self) -> int:
        return self.extended

    def protects_newest(self, budget: int) -> int:
        return self.window

    def score(self, observation: Observation, state: State) -> Tensor:
        rows = observation.window_attention(self.extended).mean(2)  # [B,H,<=O',T], rows of padding are 0
        recent = rows[:, :, -self.window :]
        wide, narrow = (observation.seen.clamp(max=n)[:, None, None] for n in (self.extended, self.window))
        candidates = observation.occupied & ~observation.newest(self.window)
        scores = recent.sum(2) / narrow
        scores = torch.where(self._least_focused(scores, candidates)[..., None], rows.sum(2) / wide, scores)
        if self.pool == "before":
            scores = self._pooled(scores, candidates)
        covered = observation.shared.get(COVERED)
        if covered is None:
            covered = scores.new_zeros(scores.shape[0], 1, scores.shape[2])
        importance = recent.amax(1, keepdim=True).sum(2) / narrow  # [B,1,T]
        raised = scores + self.lam * importance * (1 - covered / (observation.layer + 1))
        if self.pool == "after":
            raised = self._pooled(raised, candidates)
        return self._preserving(raised, scores, candidates, observation.budgets)

    def selected(self, observation: Observation, kept: Tensor) -> None:
        """Count the layer in for every token that at least one of its heads keeps."""
        covered = observation.shared.get(COVERED)
        now = kept.any(1, keepdim=True).float()
        observation.shared[COVERED] = now if covered is None else covered + now

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

    def _pooled(self, scores: Tensor, candidates: Tensor) -> Tensor:
        among = scores.masked_fill(~candidates, -torch.inf)
        pooled = F.max_pool1d(among, self.kernel, stride=1, padding=self.kernel // 2)
        return torch.where(candidates, pooled, scores)

    def _preserving(self, raised: Tensor, scores: Tensor, candidates: Tensor, budgets: tuple[int, ...]) -> Tensor:
        """Each head's best candidates by `scores` made sure of: infinite, or the literal 1.0 of the paper."""
        counts = scores.new_tensor([min(int(self.beta * b), b - self.window) for b in budgets], dtype=torch.long)
        order = scores.masked_fill(~candidates, -torch.inf).argsort(dim=-1, descending=True, stable=True)
        best = (torch.arange(order.shape[-1], device=order.device) < counts[:, None, None]).expand_as(order)
        best = torch.zeros_like(candidates).scatter_(-1, order, best) & candidates
        return raised.masked_fill(best, torch.inf if self.preserve == "forced" else 1.0)
