"""KVzip+: keep tokens that contribute most to the hidden states while the prompt is repeated."""

from dataclasses import dataclass

from kvbench.policies.pre_passes.pre_pass import PrePass
from kvbench.policies.pre_passes.weighed_repetition import WeighedRepetition
from kvbench.policies.scorers.kvzip import KVzip


@dataclass(frozen=True)
class KVzipPlus(KVzip):
    """KVzip with attention weights scaled by the token's contribution to a hidden state, relative to the state's norm.

        s_j = max_(h in "group", q in "repeated prompt") A_(h,q,j) * ||W_O^h v_j|| / ||x_q||

    x_q is the hidden state of the query's token before the layer's attention; W_O^h is the output projection of head h.

    sinks: number of first tokens that are always kept. chunk: prompt tokens per repetition pass.
    Source: kvpress 0.5.5, KVzipPress with kvzip_plus_normalization; KVzip is Kim et al. 2025, arXiv 2505.23416.
    """

    @property
    def pre_pass(self) -> PrePass:
        return WeighedRepetition(self.chunk, self.sinks)
