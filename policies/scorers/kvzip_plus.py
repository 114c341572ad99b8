"""KVzip+: what a token adds to the hidden states while the prompt is said again."""

from dataclasses import dataclass

from kvbench.policies.pre_passes.pre_pass import PrePass
from kvbench.policies.pre_passes.weighed_repetition import WeighedRepetition
from kvbench.policies.scorers.kvzip import KVzip


@dataclass(frozen=True)
class KVzipPlus(KVzip):
    """KVzip whose attention weights are weighed by what they add to a hidden state, against its own size.

        s_j = max_(h in "group", q in "repeated prompt") A_(h,q,j) * ||W_O^h v_j|| / ||x_q||

    x_q is what the layer's attention is given of the query's token, W_O^h the output projection of head h.

    sinks: first tokens, always kept. chunk: tokens of the prompt that are repeated in one pass.
    Source: kvpress 0.5.5, KVzipPress with kvzip_plus_normalization; KVzip is Kim et al. 2025, arXiv 2505.23416.
    """

    @property
    def pre_pass(self) -> PrePass:
        return WeighedRepetition(self.chunk, self.sinks)
