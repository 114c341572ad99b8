"""Expected attention: what future queries will attend to, as far as the queries so far tell.

Shapes: B batch, H_q query heads, H_kv KV heads, G = H_q / H_kv, M queries, T slots, D head dim.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.kernels.references import widen
from kvbench.policies.checks import number, whole_number
from kvbench.policies.needs import Needs, Protected
from kvbench.policies.observation import Memory, Observation, State
from kvbench.policies.scorers.scorer import AttentionScorer


@dataclass(frozen=True)
class ExpectedAttention(AttentionScorer):
    """Keep what the next queries will attend to, were they drawn from the distribution of those so far.

        q ~ N(mu_h, Sigma_h), "before rotation;" R = 1 / F sum_(t = T)^(T + F - 1) R_t
        z_(h,j) = (R mu_h) k_j / sqrt(D) + k_j^T R Sigma_h R^T k_j / (2 D)
        s_j = (1 / G sum_(h in "group") softmax_j(z_(h,j)) + epsilon) ||v_j||_2

    Mean and (biased) covariance of a head's queries are remembered per layer and grow with every block and every
    decoded token; the first `sinks` queries have no part in them, nor those tokens in the softmax. F is `future`, R_t
    the model's own rotation at position t, q what it rotates.

    future: positions from the next on that queries are expected at. sinks: first tokens, always kept. covariance:
    false takes the mean alone. values: false leaves the norm of the value out. epsilon: added to the attention, so that
    large values count where none falls.
    Source: Devoto et al. 2025, arXiv 2510.00636, section 3.
    """

    future: int = 512
    sinks: int = 4
    covariance: bool = True
    values: bool = True
    epsilon: float = 0.0

    needs = Needs(model=True, memory=True, never_negative=True)

    def __post_init__(self) -> None:
        whole_number("future", self.future, 1)
        whole_number("sinks", self.sinks, 0)
        number("epsilon", self.epsilon, 0)

    def protects(self, budget: int) -> Protected:
        return Protected(first=self.sinks)

    def observe(self, observation: Observation, state: State) -> None:
        queries, memory = observation.unrotated_queries().detach(), observation.memory
        counted = observation.query_positions >= self.sinks
        new = counted.sum(-1)
        if "count" not in memory:
            heads, dim = queries.shape[1], queries.shape[-1]
            memory["count"] = torch.zeros_like(new)
            memory["mean"] = queries.new_zeros(len(new), heads, dim)
            if self.covariance:
                memory["scatter"] = queries.new_zeros(len(new), heads, dim, dim)
        _add(memory, queries, counted[:, None, :, None], new)

    def raw(self, observation: Observation, state: State) -> Tensor:
        keys = widen(observation.keys)[:, :, None]  # [B,H_kv,1,T,D]
        mean, covariance = self._rotated(observation)
        logits = (keys @ mean[..., None])[..., 0] * keys.shape[-1] ** -0.5
        if covariance is not None:
            logits = logits + ((keys @ covariance) * keys).sum(-1) / (2 * keys.shape[-1])
        among = observation.occupied & ~observation.first(self.sinks)
        shares: Tensor = logits.masked_fill(~among[:, :, None], -torch.inf).softmax(-1)
        return shares.nan_to_num(0.0)

    def finish(self, raw: Tensor, observation: Observation) -> Tensor:
        return (raw + self.epsilon) * widen(observation.values).norm(dim=-1) if self.values else raw + self.epsilon

    def _rotated(self, observation: Observation) -> tuple[Tensor, Tensor | None]:
        """Mean [B,H_kv,G,D] and covariance [B,H_kv,G,D,D] of the queries expected, group by group."""
        memory, heads = observation.memory, observation.keys.shape[1]
        positions = observation.seen[:, None] + torch.arange(self.future, device=observation.seen.device)
        rotation = observation.rotation(positions[:, None]).mean(observation.queries.shape[-1]).to(memory["mean"].dtype)
        mean = (rotation @ memory["mean"][..., None])[..., 0].unflatten(1, (heads, -1))
        if not self.covariance:
            return mean, None
        count = memory["count"].clamp(min=1)[:, None, None, None]
        return mean, (rotation @ (memory["scatter"] / count) @ rotation.mT).unflatten(1, (heads, -1))


def _add(memory: Memory, queries: Tensor, counted: Tensor, new: Tensor) -> None:
    """Take queries [B,H_q,M,D] into count, mean and scatter (sum of squared deviations), in place.

    counted [B,1,M,1] bool; new [B]: how many count. Sums of squares would cancel where the mean is large, so that the
    deviations of the new queries from their own mean are joined with those so far (Chan et al. 1979).
    """
    count, both = memory["count"], memory["count"] + new
    share = (new / both.clamp(min=1)).to(queries.dtype)[:, None, None]
    own = (queries * counted).sum(2) / new.clamp(min=1)[:, None, None]
    apart = own - memory["mean"]
    if "scatter" in memory:
        deviations = (queries - own[:, :, None]) * counted
        between = (share * count[:, None, None]).to(queries.dtype)[..., None] * apart[..., None] * apart[..., None, :]
        memory["scatter"] += deviations.mT @ deviations + between
    memory["mean"] += share * apart
    memory["count"] += new
