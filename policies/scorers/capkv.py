"""CAPKV: keep the tokens without which the values of relevant tokens would span less.

Shapes: B batch, H_kv KV heads, G query heads per KV head, T slots, D head dim.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.kernels.references import widen
from kvbench.policies.checks import number
from kvbench.policies.needs import Needs, Protected
from kvbench.policies.observation import Memory, Observation, State
from kvbench.policies.scorers.expected_attention import ExpectedAttention
from kvbench.policies.scorers.scorer import AttentionScorer


@dataclass(frozen=True)
class CapKV(AttentionScorer):
    """Keep the tokens of highest leverage among values that are weighted by the agreement of key and mean query.

        w_(h,j) = e^("tau" * (cos(k_j, mu_h) - max_i cos(k_i, mu_h)))
        A_h = I + sum_j (w_(h,j) + epsilon) v_j v_j^T
        s_j = 1 / G sum_(h in "group") w_(h,j) v_j^T A_h^(-1) v_j

    mu_h is the mean of a head's queries before rotation, without the first `sinks`, rotated to the next `future`
    positions as in expected attention. The sinks are always kept and are in no sum.

    tau: sharpness of the weights. future: number of next positions that are averaged over. sinks: number of first
    tokens that are always kept. epsilon: added to each weight in A.
    Source: arXiv 2604.25975; normalised keys and rotated queries follow its code, kvpress's CapPress.
    """

    needs = Needs(model=True, memory=True, keys=True, never_negative=True)

    tau: float = 5.0
    future: int = 512
    sinks: int = 4
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        number("tau", self.tau, 0)
        number("epsilon", self.epsilon, 0)
        _ = self._queries  # checks the other fields

    @cached_property
    def _queries(self) -> ExpectedAttention:
        return ExpectedAttention(self.future, self.sinks, covariance=False)

    def protects(self, budget: int) -> Protected:
        return Protected(first=self.sinks)

    def observe(self, observation: Observation, state: State) -> None:
        self._queries.observe(observation, state)

    def forget(self, memory: Memory) -> None:
        self._queries.forget(memory)

    def raw(self, observation: Observation, state: State) -> Tensor:
        mean, _ = self._queries.rotated(observation)  # [B,H_kv,G,D]
        among = (observation.occupied & ~observation.first(self.sinks))[:, :, None]
        keys, values = F.normalize(widen(observation.keys), dim=-1), widen(observation.values)
        agreement = F.normalize(mean.to(keys.dtype), dim=-1) @ keys.mT  # [B,H_kv,G,T]
        logits = (self.tau * agreement.clamp(-1, 1)).masked_fill(~among, -torch.inf)
        weights = (logits - logits.amax(-1, keepdim=True)).exp().nan_to_num(0.0)
        scaled = values[:, :, None] * ((weights + self.epsilon) * among).sqrt()[..., None]
        capacity = scaled.mT @ scaled + torch.eye(values.shape[-1], dtype=values.dtype, device=values.device)
        solved = torch.linalg.solve(capacity, values.mT[:, :, None].expand(-1, -1, mean.shape[2], -1, -1))
        leverage: Tensor = (values.mT[:, :, None] * solved).sum(-2)
        return weights * leverage
