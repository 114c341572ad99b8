"""Oracles: the tokens that a query attends to most, selected by its own attention. Upper bounds, not methods."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvbench.kernels.references import widen
from kvbench.policies.checks import number
from kvbench.policies.observation import State
from kvbench.policies.readers.reader import Reader, Reading


@dataclass(frozen=True)
class Oracle(Reader):
    """Scores tokens by the query's attention weights, averaged over the query heads of a KV head."""

    reads_keys: ClassVar[bool] = True

    page = 1

    def summarise(self, keys: Tensor, present: Tensor) -> State:
        return {}

    def score(self, reading: Reading) -> Tensor:
        queries = widen(reading.queries).unflatten(1, (-1, reading.group))[:, :, :, 0]  # [B,H_kv,G,D]
        return reading.weights(queries @ widen(reading.keys).mT * reading.scaling, reading.visible)


@dataclass(frozen=True)
class OracleTopK(Oracle):
    """Read the tokens with the largest attention weights: an upper bound for readers with a budget, not a method.

        s_j = mean_(h in "group") softmax_j(q_h k_j)

    The softmax includes the model's own attention sinks (gpt-oss), which take a share of every head. The selection
    reads every key, and the bytes read include all keys. Ties go to the older token. The oracle maximises the attention
    mass of the budget, not the score of a task. First tokens and windows are not added, and grouped query heads share
    one set.
    Source: the oracle of skylight-org/sparse-attention-hub (maskers/fixed), which selects per query head.
    """


@dataclass(frozen=True)
class OracleTopP(Oracle):
    """Read the fewest tokens with a total attention weight of `mass`: an upper bound, not a method.

        min |S| : sum_(j in S) s_j >= p, s_j = mean_(h in "group") softmax_j(q_h k_j)

    With the model's own attention sinks (gpt-oss), p is a share of the weight that tokens receive. The policy has no
    budget; tables show the number of tokens read. The selection reads every key, and the bytes read include all keys.
    Ties go to the older token. Grouped query heads share one set.

    mass: p, above 0, at most 1.
    Source: the oracle of skylight-org/sparse-attention-hub (maskers/fixed), where p is a share of the attention outside
    of sinks and window.
    """

    mass: float = 0.95

    def __post_init__(self) -> None:
        number("mass", self.mass, 1e-6, 1)
