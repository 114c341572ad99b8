"""The base of H2O and its relatives: attention summed over all queries so far."""

from torch import Tensor

from kvbench.policies.needs import Needs
from kvbench.policies.observation import Observation, State
from kvbench.policies.scorers.scorer import AttentionScorer


class AttentionSums(AttentionScorer):
    """Accumulates the attention that every stored token receives from all queries, its own included.

    While decoding each step adds the new query's attention. An evicted token's sum is evicted with it; a token that
    others were merged into keeps its own.
    """

    needs = Needs(statistics=("attention_sum",), sums="column_sums", newest_row=True, never_negative=True)

    def observe(self, observation: Observation, state: State) -> None:
        drawn = observation.column_sums().transpose(-1, -2)  # [B,H_kv,T,G]
        total = state["attention_sum"]
        total += drawn if total.shape[-1] == drawn.shape[-1] else drawn.mean(-1, keepdim=True)

    def raw(self, observation: Observation, state: State) -> Tensor:
        return state["attention_sum"].transpose(-1, -2)
