"""Fair eviction: the parts of a prompt that a task names keep the same share of their tokens.

Shapes: B batch, H KV heads, T slots.
"""

from dataclasses import dataclass, field, replace

import torch

from kvbench.policies.ranking import Ranking
from kvbench.policies.selections.selection import Selection
from kvbench.policies.selections.shares import ranks_within


@dataclass(frozen=True)
class Fair(Selection):
    """Tokens compete only within their part of the prompt, so that no part is evicted more than another.

        n_1 = floor(n T_1 / T), n_2 = n - n_1

    n tokens of two adjacent parts of T_1 and T_2 tokens are kept. Parts reach from their first token to the next part,
    the first one from the prompt's start and the last one to the newest token. Protected tokens rank highest in their
    part.

    starts: positions of the first tokens of the parts, which the task names for each example (task=instructions).
    Source: arXiv 2510.00231, fair eviction; there, the windows of queries are divided too, here they are not.
    """

    starts: tuple[int, ...] = field(default=(), metadata={"decides": False})

    def rank(self, ranking: Ranking) -> Ranking:
        if len(self.starts) < 2:
            raise ValueError(
                "fair_ divides the budget among the parts of a prompt, and this task names fewer than two: use "
                "task=instructions, or a task whose examples have spans"
            )
        bounds = torch.tensor(self.starts[1:], device=ranking.positions.device)
        parts = torch.searchsorted(bounds, ranking.positions.long().contiguous(), right=True)
        rank, size = ranks_within(ranking, parts)
        shares = -(rank - (parts > 0).double()) / size  # the first part is rounded down
        return replace(ranking, scores=shares, tie_break=ranking.scores)
