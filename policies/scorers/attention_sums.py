"""What H2O and its relatives share: attention summed over all queries so far."""

from torch import Tensor

from kvbench.policies.needs import Needs
from kvbench.policies.observation import Observation, State
from kvbench.policies.scorers.scorer import AttentionScorer


class AttentionSums(AttentionScorer):
    """A scorer that keeps, for every token, the attention it drew from all queries since it entered, its own included.

    While decoding the sums go on: each step adds the new query's row over what is stored. An evicted token takes its
    sum with it; a token that absorbed others (merging) keeps its own.
    """

    needs = Needs(statistics=("attention_sum",), sums="column_sums", newest_row=True, never_negative=True)

    def observe(self, observation: Observation, state: State) -> None:
        drawn = observation.column_sums().transpose(-1, -2)  # [B,H_kv,T,G]
        total = state["attention_sum"]
        total += drawn if total.shape[-1] == drawn.shape[-1] else drawn.mean(-1, keepdim=True)

    def raw(self, observation: Observation, state: State) -> Tensor:
        return state["attention_sum"].transpose(-1, -2)
