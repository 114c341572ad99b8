"""Expected attention: keep tokens that future queries are expected to attend to, estimated from past queries.

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
    """Keep the tokens that future queries attend to if they follow the distribution of past queries.

        q ~ N(mu_h, Sigma_h), "before rotation;" R = 1 / F sum_(t = T)^(T + F - 1) R_t
        z_(h,j) = (R mu_h) k_j / sqrt(D) + k_j^T R Sigma_h R^T k_j / (2 D)
        s_j = (1 / G sum_(h in "group") softmax_j(z_(h,j)) + epsilon) ||v_j||_2

    Mean and (biased) covariance of a head's queries are stored per layer and updated with every block and every decoded
    token, and freed after the prompt if decoding evicts nothing. The first `sinks` queries are excluded from them, and
    the first `sinks` tokens from the softmax. F is `future`, R_t the model's rotation at position t, q a query before
    rotation.

    future: number of next positions that are averaged over. sinks: number of first tokens that are always kept.
    covariance: false uses only the mean. values: false omits the norm of the value. epsilon: added to the attention, so
    that large values matter for tokens without attention.
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
        queries, memory = unrotated_queries(observation).detach(), observation.memory
        counted = observation.query_positions >= self.sinks
        new = counted.sum(-1)
        if "count" not in memory:
            heads, dim = queries.shape[1], queries.shape[-1]
            memory["count"] = torch.zeros_like(new)
            memory["mean"] = queries.new_zeros(len(new), heads, dim)
            if self.covariance:
                memory["scatter"] = queries.new_zeros(len(new), heads, dim, dim)
        _add(memory, queries, counted[:, None, :, None], new)

    def forget(self, memory: Memory) -> None:
        for name in ("count", "mean", "scatter"):
            memory.pop(name, None)

    def raw(self, observation: Observation, state: State) -> Tensor:
        keys = widen(observation.keys)[:, :, None]  # [B,H_kv,1,T,D]
        mean, covariance = self.rotated(observation)
        logits = (keys @ mean[..., None])[..., 0] * keys.shape[-1] ** -0.5
        if covariance is not None:
            logits = logits + ((keys @ covariance) * keys).sum(-1) / (2 * keys.shape[-1])
        among = observation.occupied & ~observation.first(self.sinks)
        shares: Tensor = logits.masked_fill(~among[:, :, None], -torch.inf).softmax(-1)
        return shares.nan_to_num(0.0)

    def finish(self, raw: Tensor, observation: Observation) -> Tensor:
        return (raw + self.epsilon) * widen(observation.values).norm(dim=-1) if self.values else raw + self.epsilon

    def rotated(self, observation: Observation) -> tuple[Tensor, Tensor | None]:
        """Mean [B,H_kv,G,D] and covariance [B,H_kv,G,D,D] of the expected queries per group."""
        memory, heads = observation.memory, observation.keys.shape[1]
        positions = observation.seen[:, None] + torch.arange(self.future, device=observation.seen.device)
        rotation = (
            observation.model.rotation(positions[:, None]).mean(observation.queries.shape[-1]).to(memory["mean"].dtype)
        )
        mean = (rotation @ memory["mean"][..., None])[..., 0].unflatten(1, (heads, -1))
        if not self.covariance:
            return mean, None
        count = memory["count"].clamp(min=1)[:, None, None, None]
        return mean, (rotation @ (memory["scatter"] / count) @ rotation.mT).unflatten(1, (heads, -1))


def unrotated_queries(observation: Observation) -> Tensor:
    """The queries of this step before their rotation, [B,H_q,M,D] float32."""
    places = observation.query_positions[:, None].clamp(min=0)
    return observation.model.rotation(places).inverse().apply(observation.queries)


def _add(memory: Memory, queries: Tensor, counted: Tensor, new: Tensor) -> None:
    """Update count, mean and scatter (sum of squared deviations) with queries [B,H_q,M,D], in place.

    counted [B,1,M,1] bool; new [B]: number of counted queries. Sums of squares would cancel if the mean is large.
    Therefore the deviations of the new queries from their mean are combined with the previous deviations (Chan et al.
    1979).
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
