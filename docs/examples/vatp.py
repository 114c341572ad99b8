"""VATP: attention times the norm of the value."""

from dataclasses import dataclass

from torch import Tensor

from kvbench.policies.checks import whole_number
from kvbench.policies.needs import Needs, Protected
from kvbench.policies.observation import Observation, State
from kvbench.policies.scorers.scorer import AttentionScorer


@dataclass(frozen=True)
class Vatp(AttentionScorer):
    """Keep tokens with high attention and large values; the first `sinks` and the newest `window` are always kept.

        s_j = ||v_j||_1 * 1 / G sum_(h in "group") sum_(q in "window") A_(h,q,j)

    sinks: number of first tokens that are always kept. window: number of newest queries, which score and are kept.
    Source: Guo et al. 2024, arXiv 2406.12335, with SnapKV's window instead of sums since the beginning (ours).
    """

    sinks: int = 4
    window: int = 32

    def __post_init__(self) -> None:
        whole_number("sinks", self.sinks, 0)
        whole_number("window", self.window, 1)

    @property
    def needs(self) -> Needs:
        return Needs(window=self.window, keys=True)

    def protects(self, budget: int) -> Protected:
        return Protected(first=self.sinks, newest=self.window)

    def raw(self, observation: Observation, state: State) -> Tensor:
        attention = observation.window_sums(self.window)  # [B,H_kv,G,T]
        norms = observation.values.float().abs().sum(-1)  # [B,H_kv,T]
        return attention * norms[:, :, None]
