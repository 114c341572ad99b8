"""One threshold for the scores of all layers and KV heads.

Shapes: B batch, L layers, H KV heads, T slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvbench.policies.allocators.ada import top_over_heads
from kvbench.policies.allocators.allocator import JointAllocator
from kvbench.policies.ranking import Ranking
from kvbench.policies.stores.slots import padded


@dataclass(frozen=True)
class GlobalThreshold(JointAllocator):
    """The tokens of all layers and KV heads compete for all slots: each head keeps its tokens above one threshold.

        b_(l,h) = sum_j [s_(l,h,j) >= theta], sum_(l,h) b_(l,h) = L * H * b

    Scores of different layers are compared without scaling, so they must have the same meaning in each layer. Protected
    tokens stay in every head and count in the budget. Ties go to the lower position, then to the lower layer, then to
    the lower head.

    Source: Kim et al. 2025, arXiv 2505.23416 (KVzip), section 3.3 (non-uniform budgets).
    """

    def heads_of_all(self, rankings: Sequence[Ranking], budgets: Sequence[Sequence[int]]) -> list[Tensor]:
        heads = rankings[0].scores.shape[1]
        fixed = _side_by_side([ranking.protected for ranking in rankings], False).sum(-1)
        joint = Ranking(
            scores=_side_by_side([ranking.scores for ranking in rankings], 0.0),
            tie_break=None if rankings[0].tie_break is None else _side_by_side([_tied(x) for x in rankings], 0.0),
            positions=_side_by_side([ranking.positions for ranking in rankings], -1),
            protected=_side_by_side([ranking.protected for ranking in rankings], False),
            seen=rankings[0].seen,
        )
        total = heads * fixed.new_tensor(budgets).sum(0) - fixed.sum(-1)
        won = top_over_heads(joint, joint.occupied & ~joint.protected, total.clamp(min=0))
        return list((fixed + won).split(heads, dim=1))


def _tied(ranking: Ranking) -> Tensor:
    assert ranking.tie_break is not None
    return ranking.tie_break


def _side_by_side(layers: Sequence[Tensor], fill: float) -> Tensor:
    """Concatenate tensors [B,H,T] of L layers to [B,L*H,T], on the device of the first tensor."""
    rows = padded([layer.to(layers[0].device) for layer in layers], fill)
    return rows.view(len(layers), -1, *rows.shape[1:]).transpose(0, 1).flatten(1, 2)
