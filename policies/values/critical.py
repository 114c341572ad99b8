"""CriticalKV: half of the budget by score alone, half by score times the value's contribution to the layer's output.

Shapes: B batch, H_q query heads, H_kv KV heads, G = H_q / H_kv, T slots, D head dim.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.kernels.references import widen
from kvbench.kernels.selection import select
from kvbench.policies.checks import number
from kvbench.policies.constants import on_device
from kvbench.policies.needs import Needs
from kvbench.policies.observation import Observation, State
from kvbench.policies.scorers.scorer import Scorer
from kvbench.policies.values.value import ValueAware
from kvbench.policies.windows import window_length

AT_ONCE = 2**22  # number of projected elements in memory at once


@dataclass(frozen=True)
class Critical(ValueAware):
    """Keep the best tokens by score alone, then the best by score times the norm of the projected value.

        n_j = 1 / G sum_(h in "group") ||W_O^h v_j||_1
        c_j = (s_j + epsilon) n_j

    The first floor(`first` b) tokens of a head's budget b have the highest s and include protected tokens; the others
    have the highest c. Scores that are sums over a window get epsilon once per query. Negative scores use the same
    formula, as in kvpress: a larger n then lowers them. If heads have different budgets (ada), the first stage is a
    share of the layer's mean budget.

    epsilon: added to every score, so that values matter for tokens without attention. first: the share of the budget
    that is filled by score alone.
    Source: Feng et al. 2025, arXiv 2502.03805, algorithm 1.
    """

    needs = Needs(model=True)

    epsilon: float = 1e-4
    first: float = 0.5

    def __post_init__(self) -> None:
        number("epsilon", self.epsilon, 0)
        number("first", self.first, 0, 1)

    def score(
        self,
        scorer: Scorer,
        scores: Tensor,
        observation: Observation,
        state: State,
        protected: Tensor,
        layer_wide: bool,
    ) -> Tensor:
        norms = norms_of_sets(observation, scores, layer_wide)
        summed = scorer.needs.never_negative and scorer.needs.window
        queries = window_length(observation, scorer.needs.window) if summed else 1
        weighed = ((scores + self.epsilon * queries) * norms).masked_fill(~observation.occupied, 0.0)
        counts = on_device(tuple(int(self.first * budget) for budget in observation.sequences.budgets), scores.device)
        chosen = select(scores, None, observation.positions, protected, counts[:, None].expand(scores.shape[:2]))
        above = 2 * weighed.abs().amax((1, 2), keepdim=True) + 1
        return torch.where(chosen, above, weighed)


def norms_of_sets(observation: Observation, scores: Tensor, layer_wide: bool) -> Tensor:
    """`projected_norms` of every token set: their mean [B,1,T] if all heads share one set or one latent."""
    norms = observation.once("projected norms", lambda: projected_norms(observation))
    return norms.mean(1, keepdim=True) if layer_wide or norms.shape[1] > scores.shape[1] else norms


def projected_norms(observation: Observation) -> Tensor:
    """The mean over the group of the L1 norm of each projected value, [B,H_kv,T] float32."""
    values, projection = observation.values, observation.model.output_projection()
    heads = projection.unflatten(0, (values.shape[1], -1))  # [H_kv,G,D,hidden]
    tokens = max(1, AT_ONCE // (len(values) * projection.shape[-1]))
    norms = []
    for some in values.split(tokens, dim=2):
        of_heads = [
            torch.stack([(widen(own) @ widen(weight)).abs().sum(-1) for weight in weights]).mean(0)
            for own, weights in zip(some.unbind(1), heads, strict=True)
        ]
        norms.append(torch.stack(of_heads, dim=1))
    return torch.cat(norms, dim=-1)
