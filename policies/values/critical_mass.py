"""DefensiveKV's use of values: pin the tokens with most of the attention, then score times normalised value norms.

Shapes: B batch, H_kv KV heads, T slots.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.policies.checks import choice, number
from kvbench.policies.constants import on_device
from kvbench.policies.needs import Needs
from kvbench.policies.observation import Observation, State
from kvbench.policies.positions import sum_over_heads
from kvbench.policies.scorers.scorer import Scorer
from kvbench.policies.values.critical import norms_of_sets
from kvbench.policies.values.value import ValueAware
from kvbench.policies.windows import window_length


@dataclass(frozen=True)
class CriticalMass(ValueAware):
    """CriticalKV with a first stage that ends at a share of the attention instead of a share of the budget.

        u_j = 1 / G sum_(h in "group") ||W_O^h v_j||_1, n_j = u_j / (sum_(i in C) u_i)
        c_j = s_j n_j
        a_j = 1 / (G w) sum_(h in "group", q in "window") A_(h,q,j), "divided by its sum over" C

    C are the tokens before the window of w queries. In each KV head, the tokens with the largest a are pinned while
    the sum of a stays below `mass` - beta, at most (T - w) b / T - w of them. beta is the share of the window's
    attention on the window itself, averaged over heads and queries. Pinned tokens precede all others, which are ranked
    by c.

    mass: share of the attention that is pinned. official: as in the code, n divides by the sum over the KV heads of the
    layer instead of tokens, beta is measured on the last w tokens of C, and pinned tokens score the layer's largest c.
    Source: Feng et al. 2025, arXiv 2510.13334; the equations follow its code.
    """

    needs = Needs(model=True, window=1)

    mass: float = 0.9
    official: bool = False

    def __post_init__(self) -> None:
        number("mass", self.mass, 0, 1)
        choice("official", self.official, True, False)

    def score(
        self,
        scorer: Scorer,
        scores: Tensor,
        observation: Observation,
        state: State,
        protected: Tensor,
        layer_wide: bool,
    ) -> Tensor:
        window = scorer.needs.window
        among = observation.occupied & ~observation.newest(window)
        norms = norms_of_sets(observation, scores, layer_wide)
        total = sum_over_heads(norms, observation) if self.official else (norms * among).sum(-1, keepdim=True)
        weighed = (scores * norms / total.clamp(min=torch.finfo(norms.dtype).tiny)).masked_fill(~among, 0.0)
        pinned = self._pinned(observation, window, among, layer_wide)
        largest = weighed.amax((1, 2), keepdim=True)
        return torch.where(pinned, largest if self.official else 2 * largest + 1, weighed)

    def _pinned(self, observation: Observation, window: int, among: Tensor, layer_wide: bool) -> Tensor:
        """The tokens of the first stage, bool [B,H_kv,T]."""
        drawn = observation.window_mean(window)
        drawn = drawn / window_length(observation, window)
        if layer_wide:
            drawn = drawn.mean(1, keepdim=True).expand_as(drawn)
        own = observation.newest(window)
        if self.official:
            own = observation.newest(2 * window) & ~own
        beta = (drawn * own).sum(-1).mean(-1)[:, None, None]  # of the layer
        drawn = drawn * among
        share = drawn / drawn.sum(-1, keepdim=True).clamp(min=torch.finfo(drawn.dtype).tiny)
        best = share.masked_fill(~among, -1.0).sort(dim=-1, descending=True, stable=True)
        stored = observation.occupied.sum(-1)[..., None]
        budgets = on_device(tuple(observation.sequences.budgets), stored.device)[:, None, None]
        most = ((stored - window) * budgets / stored.clamp(min=1) - window).floor().clamp(min=0)  # [B,H_kv,1]
        places = torch.arange(best.values.shape[-1], device=most.device)
        chosen = (best.values.cumsum(-1) < self.mass - beta) & (places < most)
        return torch.zeros_like(among).scatter_(-1, best.indices, chosen) & among
