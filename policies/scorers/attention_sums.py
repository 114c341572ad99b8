"""The base class of H2O and related scorers: attention summed over all queries so far."""

from torch import Tensor

from kvbench.policies.needs import Needs
from kvbench.policies.observation import Observation, State
from kvbench.policies.scorers.scorer import AttentionScorer


class AttentionSums(AttentionScorer):
    """Accumulates the attention that every stored token receives from all queries, including its own query.

    Each decoding step adds the new query's attention. The sum of an evicted token is evicted with it; merging does not
    change the sum of a kept token.
    """

    needs = Needs(statistics=("attention_sum",), sums="column_sums", newest_row=True, never_negative=True)

    def observe(self, observation: Observation, state: State) -> None:
        drawn = observation.column_sums().transpose(-1, -2)  # [B,H_kv,T,G]
        total = state["attention_sum"]
        total += drawn if total.shape[-1] == drawn.shape[-1] else drawn.mean(-1, keepdim=True)

    def raw(self, observation: Observation, state: State) -> Tensor:
        return state["attention_sum"].transpose(-1, -2)
