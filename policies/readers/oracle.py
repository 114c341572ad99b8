"""Oracles: the tokens that a query attends to most, chosen by its own attention. Upper bounds, no methods."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.kernels.references import widen
from kvbench.policies.checks import number
from kvbench.policies.observation import State
from kvbench.policies.readers.reader import Reader, Reading


@dataclass(frozen=True)
class Oracle(Reader):
    """Tokens by the probability that the query gives them, averaged over the query heads of a KV head."""

    reads_keys: ClassVar[bool] = True

    page = 1

    def summarise(self, keys: Tensor, present: Tensor) -> State:
        return {}

    def score(self, reading: Reading) -> Tensor:
        queries = widen(reading.queries).unflatten(1, (-1, reading.group))[:, :, :, 0]  # [B,H_kv,G,D]
        logits = queries @ widen(reading.keys).mT * reading.scaling
        if reading.softcap is not None:
            logits = reading.softcap * torch.tanh(logits / reading.softcap)
        logits = logits.masked_fill(~reading.visible[:, :, None], -torch.inf)
        shares: Tensor = logits.softmax(-1).nan_to_num(0).mean(2)
        return shares


@dataclass(frozen=True)
class OracleTopK(Oracle):
    """Read the tokens with the largest attention probability: an upper bound for readers with a budget, no method.

        s_j = mean_(h in "group") softmax_j(q_h k_j)

    To choose, it reads every key, and the bytes read count them all. Of equal tokens the older is read. It bounds the
    attention mass that the budget can hold, not the score of a task. The budget is all that is read: no sinks and no
    window are added, and grouped query heads share one set.
    Source: the oracle of skylight-org/sparse-attention-hub (maskers/fixed), which chooses per query head.
    """


@dataclass(frozen=True)
class OracleTopP(Oracle):
    """Read the fewest tokens whose attention probabilities add up to `mass`: an upper bound, no method.

        min |S| : sum_(j in S) s_j >= p, s_j = mean_(h in "group") softmax_j(q_h k_j)

    It has no budget; tables show how many tokens were read. To choose, it reads every key, and the bytes read count
    them all. Of equal tokens the older is read. Grouped query heads share one set.

    mass: p, above 0, at most 1.
    Source: the oracle of skylight-org/sparse-attention-hub (maskers/fixed), where p is a share of what sinks and window
    leave.
    """

    mass: float = 0.95

    def __post_init__(self) -> None:
        number("mass", self.mass, 1e-6, 1)
