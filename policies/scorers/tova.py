"""TOVA: what the newest query attends to."""

from dataclasses import dataclass

from torch import Tensor

from kvbench.policies.needs import Needs
from kvbench.policies.observation import Observation, State
from kvbench.policies.scorers.scorer import AttentionScorer


@dataclass(frozen=True)
class Tova(AttentionScorer):
    """Keep the tokens the newest query attends to most; nothing is protected, the newest token included.

        s_j = 1 / G sum_(h in "group") A_(h,t,j), t = "the newest query"

    Source: Oren et al. 2024, arXiv 2401.06104, section 3. Their code keeps one set for all heads of a layer:
    `granularity=layer` of the policy; the default here is one set per KV head.
    """

    needs = Needs(window=1, window_decoding=0, newest_row=True, never_negative=True)

    def raw(self, observation: Observation, state: State) -> Tensor:
        return observation.window_attention(1).squeeze(-2)
