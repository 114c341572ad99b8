"""TOVA: keep the tokens that the newest query attends to."""

from dataclasses import dataclass

from torch import Tensor

from kvbench.policies.needs import Needs
from kvbench.policies.observation import Observation, State
from kvbench.policies.scorers.scorer import AttentionScorer


@dataclass(frozen=True)
class Tova(AttentionScorer):
    """Keep the tokens that the newest query attends to most; no token is protected, not even the newest.

        s_j = 1 / G sum_(h in "group") A_(h,t,j), t = "the newest query"

    Source: Oren et al. 2024, arXiv 2401.06104, section 3. Its code keeps one token set for all heads of a layer
    (`granularity=layer` of the policy); the default here is one set per KV head.
    """

    needs = Needs(window=1, window_decoding=0, newest_row=True, never_negative=True)

    def score(self, observation: Observation, state: State) -> Tensor:
        return observation.once(self, lambda: super(Tova, self).score(observation, state))

    def raw(self, observation: Observation, state: State) -> Tensor:
        rows = observation.window_attention(1)  # one, and those of a lookahead
        return rows.squeeze(-2) if rows.shape[-2] == 1 else rows.sum(-2)
