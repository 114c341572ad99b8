"""R-KV: keep tokens that the newest queries attend to and that have no similar key.

Shapes: B batch, H KV heads, G query heads each, w queries of the window, T slots, n rows computed at once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvbench.kernels.references import attention_logits, widen
from kvbench.policies.checks import number, whole_number
from kvbench.policies.needs import Needs, Protected
from kvbench.policies.observation import Observation, State
from kvbench.policies.scorers.pooling import check_kernel, smooth
from kvbench.policies.scorers.scorer import Scorer
from kvbench.policies.windows import attention_before

AT_ONCE = 2**24  # number of cosines in memory at once


@dataclass(frozen=True)
class RKV(Scorer):
    """Keep tokens by attention from the newest `window` queries minus key redundancy; the window is always kept.

        p_(q,i) = "softmax"_i(max_(h in "group") q_(h,q) * k_i / sqrt(D))
        a_j = max_(|i - j| <= floor(kernel / 2)) mean_(q in "window") p_(q,i)
        c_(i,j) = cos(k_i, k_j), "but" 0 "where" i = j "or" j "is the newest with" cos(k_i, k_j) > "threshold"
        s_j = lambda * a_j - (1 - lambda) * "softmax"_j(mean_i(c_(i,j)))

    The softmax of the attention runs over the tokens before the window, the softmax of the redundancy over all stored
    tokens. The newest of several similar tokens does not count as redundant.

    window: number of newest queries, which score and are kept. kernel: odd number of pooled neighbours. lam: the weight
    of attention; null uses the paper's 0.1, or the code's 0.07 with official. threshold: the cosine above which keys
    are similar. official: as in the released code, the oldest token is exempt if a token has no similar token.
    Source: Cai et al. 2025, arXiv 2505.24133, section 3, and its code (R-KV), which evicts when the cache exceeds the
    budget by 128 tokens.
    """

    window: int = 8
    kernel: int = 7
    lam: float | None = None
    threshold: float = 0.5
    official: bool = False

    def __post_init__(self) -> None:
        whole_number("window", self.window, 1)
        check_kernel(self.kernel)
        number("threshold", self.threshold, -1, 1)
        if self.lam is not None:
            number("lam", self.lam, 0, 1)

    @property
    def needs(self) -> Needs:
        return Needs(window=self.window, keys=True)

    def protects(self, budget: int) -> Protected:
        return Protected(newest=self.window)

    def score(self, observation: Observation, state: State) -> Tensor:
        lam = self.lam if self.lam is not None else 0.07 if self.official else 0.1
        return lam * self.importance(observation) - (1 - lam) * self.redundancy(observation)

    def importance(self, observation: Observation) -> Tensor:
        """a_j, [B,H,T]."""
        assert observation.window is not None
        queries, places = observation.window.newest(self.window)
        logits = attention_logits(
            queries, observation.keys, observation.params.scaling, observation.params.softcap
        ).amax(2)
        rows = attention_before(logits, places, observation, self.window)
        real = (places >= 0).sum(-1).clamp(min=1)
        return smooth(rows.sum(2) / real[:, None, None], observation, self.window, self.kernel, "max")

    def redundancy(self, observation: Observation) -> Tensor:
        """softmax_j(mean_i(c_ij)), [B,H,T]; empty slots have none."""
        occupied, positions = observation.occupied, observation.positions
        keys = normalize(widen(observation.keys), dim=-1).masked_fill(~occupied[..., None], 0.0)
        sums = keys.new_zeros(positions.shape)
        oldest = positions.masked_fill(~occupied, torch.iinfo(positions.dtype).max).argmin(-1, keepdim=True)
        slots = torch.arange(positions.shape[-1], device=keys.device)
        for rows in slots.split(max(1, AT_ONCE // max(1, positions.numel()))):
            cosines = (keys[:, :, rows] @ keys.mT).masked_fill(rows[:, None] == slots, 0.0)  # [B,H,n,T]
            alike = (cosines > self.threshold) & occupied[:, :, None]
            newest = positions[:, :, None].where(alike, -1).argmax(-1, keepdim=True)
            spared = alike.any(-1, keepdim=True)
            if self.official:
                newest, spared = newest.where(spared, oldest[:, :, None]), torch.ones_like(spared)
            cosines.scatter_(-1, newest, cosines.gather(-1, newest).masked_fill(spared, 0.0))
            sums += cosines.sum(2)
        mean = sums / occupied.sum(-1, keepdim=True).clamp(min=1)
        return mean.masked_fill(~occupied, -torch.inf).softmax(-1)
