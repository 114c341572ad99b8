"""Worked examples of CAOTE's arithmetic, by hand, and how to make a softmax give their attention weights.

Logits are log W: with keys e_j (one-hot) and queries (log W[i][0], log W[i][1], ...) any softmax over a cached set S
gives W[i][S] / sum. Values live in the first coordinates of the same space, so norms are those of the examples.
"""

from dataclasses import dataclass

import torch
from kv_oracle import Rules
from torch import Tensor

# A: one head, one query, five tokens.
ALPHA = torch.tensor([6.0, 5.0, 4.0, 3.0, 2.0], dtype=torch.float64) / 20
SECOND_ALPHA = torch.tensor([1.0, 2.0, 3.0, 4.0, 10.0], dtype=torch.float64) / 20
FIVE_VALUES = torch.tensor([[1.0, 0.0], [-3.0, 5.0], [2.0, 2.0], [1.0, 1.0], [9.0, 2.0]], dtype=torch.float64)

# C: block-wise, one head, budget 4, blocks of 2; prompt tokens 0..5, decode token 6.
WEIGHTS = [[4], [2, 3], [3, 1, 2], [1, 2, 1, 4], [2, 1, 3, 1, 2], [1, 3, 2, 2, 1, 4], [2, 3, 1, 4, 2, 1, 3]]
SEVEN_VALUES = [(1, 0), (4, 4), (0, 2), (3, 1), (2, 6), (5, 1), (2, 2)]
CALLS = ((0, 2), (2, 4), (4, 6), (6, 7))


def crafted(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [1,1,7,8] of example C; the scaling that belongs to them is 1."""
    queries, keys, values = (torch.zeros(1, 1, 7, 8, dtype=dtype) for _ in range(3))
    for i, row in enumerate(WEIGHTS):
        queries[0, 0, i, : len(row)] = torch.tensor(row, dtype=dtype).log()
        keys[0, 0, i, i] = 1
        values[0, 0, i, :2] = torch.tensor(SEVEN_VALUES[i], dtype=dtype)
    return queries, keys, values


@dataclass(frozen=True)
class Blockwise:
    """A row of example C: all scores and the kept set, after block {4,5} and after token 6."""

    base: str
    value: str | None
    first: tuple[float, ...]
    first_kept: tuple[int, ...]
    second: tuple[float, ...]
    second_kept: tuple[int, ...]

    @property
    def rules(self) -> Rules:
        """SnapKV's window of 2 is protected, its scores shown all the same."""
        return Rules(self.base, 4, self.value, block=2, window=2, kernel=3)


# fmt: off
BLOCKWISE = [
    Blockwise("h2o", None, (2.324145, 1.358547, 0.945513, 0.764957, 0.299145, 0.307692), (0, 1, 2, 3),
              (2.477991, 1.589316, 1.022436, 1.072650, 0.230769), (0, 1, 2, 3)),
    Blockwise("h2o", "caote", (1.256651, 0.886347, 0.384205, 0.174492, 0.225707, 0.164837), (0, 1, 2, 4),
              (1.591908, 1.127734, 0.376808, 0.351183, 0.010804), (0, 1, 2, 4)),
    Blockwise("h2o", "fastcaote", (1.753855, 0.656310, 0.471799, 0.208078, 0.194184, 0.153153), (0, 1, 2, 3),
              (1.303263, 0.983665, 0.382643, 0.258182, 0.007490), (0, 1, 2, 3)),
    Blockwise("tova", None, (1 / 13, 3 / 13, 2 / 13, 2 / 13, 1 / 13, 4 / 13), (1, 2, 3, 5),
              (0.250000, 0.083333, 0.333333, 0.083333, 0.250000), (1, 2, 3, 6)),
    Blockwise("tova", "caote", (0.253833, 0.609248, 0.574108, 0.211647, 0.334625, 0.967588), (1, 2, 4, 5),
              (0.632778, 0.332963, 0.697316, 0.361410, 0.632778), (1, 4, 5, 6)),
    Blockwise("tova", "fastcaote", (0.231157, 0.672681, 0.458568, 0.258909, 0.308383, 1.259259), (1, 2, 4, 5),
              (0.737342, 0.309520, 0.764853, 0.347122, 0.499796), (1, 4, 5, 6)),
    Blockwise("snapkv", None, (0.341880, 0.487179, 0.487179, 0.487179, 0.299145, 0.307692), (1, 2, 4, 5),
              (0.600000, 0.600000, 0.300000, 0.500000, 0.300000), (1, 2, 5, 6)),
    Blockwise("snapkv", "caote", (0.447029, 0.586345, 0.623222, 0.355293, 0.529837, 0.418902), (1, 2, 4, 5),
              (0.630838, 0.980417, 0.486034, 0.826214, 0.157875), (1, 2, 5, 6)),
    Blockwise("snapkv", "fastcaote", (0.458494, 0.568042, 0.638938, 0.360747, 0.524377, 0.414634), (1, 2, 4, 5),
              (0.607223, 0.983180, 0.458912, 0.867806, 0.174929), (1, 2, 5, 6)),
]
# fmt: on

CANDIDATES = ((0.509463, 1.055494, 0.771137, 0.473886), (1.359739, 1.707500, 0.600000))
"""caote_snapkv with norm_domain=candidates: scores of the tokens that may go, at the two events; the same kept sets."""

OUTPUTS = {
    "attend_then_evict": ((1.444444, 2.555556), (3.153846, 2.153846), (2.7, 3.3)),
    "evict_then_attend": ((1.333333, 3.666667), (3.4, 2.6), (3.0, 3.444444)),
}
"""caote_tova: outputs of queries 4, 5 and 6."""
