"""CAOTE: score a token by the error that its eviction causes in the attention output."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvbench.kernels.references import widen
from kvbench.policies.checks import check_choices, number
from kvbench.policies.needs import Needs
from kvbench.policies.observation import Observation, State
from kvbench.policies.scorers.eviction_error import distances
from kvbench.policies.scorers.scorer import AttentionScorer, Scorer
from kvbench.policies.values.value import ValueAware

FLOOR = 1e-3  # `minmax_sum`: the worst token keeps this share of the range, so that its score is not exactly 0


def normalise(scores: Tensor, counted: Tensor | None, how: str = "auto") -> Tensor:
    """Convert scores [...,T] to weights, in the same order, that sum to 1 over the counted slots and are 0 elsewhere.

    counted: bool [...,T]; None counts all slots.
    how: `sum` divides by the sum (1/n each if it is 0); `minmax_sum` first shifts the minimum to a thousandth of the
    range; `softmax`; `auto` is `sum` for rows without a negative score and `minmax_sum` for the others.
    Source: CAOTE (arXiv 2504.14051), eq. 22 and the end of section 3.2; `minmax_sum` is ours.
    """
    if counted is None:
        if how == "sum":
            return _shares(scores, 1 / scores.shape[-1])
        counted = torch.ones_like(scores, dtype=torch.bool)
    if how == "softmax":
        return scores.masked_fill(~counted, -torch.inf).softmax(-1).masked_fill(~counted, 0.0)
    lowest = scores.masked_fill(~counted, torch.inf).amin(-1, keepdim=True)
    highest = scores.masked_fill(~counted, -torch.inf).amax(-1, keepdim=True)
    shifted = scores - lowest + FLOOR * (highest - lowest)
    if how == "auto":
        scores = torch.where(lowest < 0, shifted, scores)
    elif how == "minmax_sum":
        scores = shifted
    even = counted.to(scores.dtype) / counted.sum(-1, keepdim=True).clamp(min=1)
    return _shares(scores.masked_fill(~counted, 0.0), even)


def _shares(scores: Tensor, even: Tensor | float) -> Tensor:
    """Scores divided by their sum, or `even` where the sum is 0."""
    total = scores.sum(-1, keepdim=True)
    return torch.where(total > 0, scores / total, even)


@dataclass(frozen=True)
class Caote(ValueAware):
    """Weigh a token by how much the attention output changes when it alone is evicted.

        c_j = alpha_j / (1 - alpha_j) * ||X - v_j||_2
        alpha_j = s_j / (sum_i s_i), X = sum_i alpha_i v_i

    alpha: the normalised scores s. X: the attention output with these weights.

    gqa: `alpha_mean` averages scores over the group first; `group_l2` is the exact error of the group's concatenated
    output; `score_mean` averages c over the group. norm_domain: alpha and X run over `all` stored tokens or over the
    evictable `candidates`. f_norm: how scores become weights, see `normalise`; `auto` is `sum` if no score is negative,
    else `minmax_sum`. eps: the lower bound of 1 - alpha. If all heads share one latent, X and v are the concatenated
    outputs and values of the heads.
    Source: Goel et al. 2025, arXiv 2504.14051, eq. 8 and 20-22; the group rules are ours (the paper is silent on GQA).
    """

    gqa: Literal["alpha_mean", "group_l2", "score_mean"] = "alpha_mean"
    norm_domain: Literal["all", "candidates"] = "all"
    f_norm: Literal["auto", "sum", "minmax_sum", "softmax"] = "auto"
    eps: float = 1e-6

    def __post_init__(self) -> None:
        check_choices(self)
        number("eps", self.eps, 0, below=1)

    @property
    def needs(self) -> Needs:
        return Needs(query_heads=self.gqa != "alpha_mean")

    def centre(self, alpha: Tensor, values: Tensor, counted: Tensor | None) -> Tensor:
        """The origin of the errors, here X = sum_j alpha_j v_j: [B,H_kv,K,T] x [B,H_kv,T,D] -> [B,H_kv,K,D]."""
        return alpha @ values

    def eviction_error(
        self, scores: Tensor, values: Tensor, counted: Tensor | None, never_negative: bool = False
    ) -> Tensor:
        """c for K score rows per KV head, [B,H_kv,K,T], like scores; counted [B,H_kv,T] (None: all slots).

        values [B,H_kv,T,D]: values of all slots; slots that are not counted are ignored. never_negative: no score is
        below 0.
        """
        how = "sum" if self.f_norm == "auto" and never_negative else self.f_norm
        if counted is not None:
            values = values.masked_fill(~counted[..., None], 0.0)  # other slots must not enter the sums
        alpha = normalise(scores, None if counted is None else counted[:, :, None], how)
        values = widen(values)
        alpha = alpha.to(values.dtype)  # random scores are float32 in a float64 model too
        centre = self.centre(alpha, values, counted)
        return distances(centre, values).mul_(alpha / (1 - alpha).clamp_(min=self.eps))

    def score(
        self,
        scorer: Scorer,
        scores: Tensor,
        observation: Observation,
        state: State,
        protected: Tensor,
        layer_wide: bool,
    ) -> Tensor:
        args = scorer, scores, observation, state, layer_wide
        if self.norm_domain == "candidates":
            return self._errors(*args, observation.occupied & ~protected)
        counted = None if observation.slots.packed else observation.occupied
        key = self, id(scores), layer_wide  # equal for budgets of one policy, while the scores are held
        return observation.once(key, lambda: (scores, self._errors(*args, counted)))[1]

    def _errors(
        self, scorer: Scorer, scores: Tensor, observation: Observation, state: State, layer_wide: bool,
        counted: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """`score`, with sums over the counted slots, bool [B,H_kv,T] (None: all slots)."""
        values, never_negative = observation.values, scorer.needs.never_negative
        shared = values.shape[1] > scores.shape[1]  # all heads share one latent, but their values differ
        if shared and counted is not None:
            counted = counted.expand(-1, values.shape[1], -1)
        if self.gqa == "alpha_mean" and not layer_wide:
            rows = scores.expand(-1, values.shape[1], -1)[:, :, None]
            error = self.eviction_error(rows, values, counted, never_negative)[:, :, 0]
            return error.norm(dim=1, keepdim=True) if shared else error
        assert isinstance(scorer, AttentionScorer), "checked when the policy is built"
        rows = scorer.score_query_heads(observation, state)
        error = self.eviction_error(rows.transpose(1, 2) if shared else rows, values, counted, never_negative)
        if layer_wide:
            return error.square().sum((1, 2)).sqrt()[:, None].expand_as(scores)
        error = error.transpose(1, 2) if shared else error
        return error.norm(dim=2) if self.gqa == "group_l2" else error.mean(2)
