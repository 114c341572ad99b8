"""Moments of a model's queries over texts: a calibration, computed once per model.

Shapes: L layers, H_q query heads, n tokens of a pass, D head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvbench.policies.observation import State
from kvbench.policies.pre_passes.pre_pass import ExtraPasses, Pass, PassStep, TextEncoder


@dataclass(frozen=True)
class QueryMoments(ExtraPasses):
    """Sums of q and of q q^T over the rotated queries of a text, per layer and query head.

    The prompt is the first token of the text and the pass is the rest, as in normal processing. The first token, an
    attention sink, is excluded from the sums. One object may process several texts.

    text: the tokens after the first.
    """

    text: tuple[int, ...]
    sums: dict[int, Tensor] = field(default_factory=dict, compare=False)  # by layer, [H_q,D] float64
    squares: dict[int, Tensor] = field(default_factory=dict, compare=False)  # [H_q,D,D] float64

    def passes(self, prompt: Sequence[int], encoder: TextEncoder) -> list[Pass]:
        return [Pass(list(self.text), range(len(prompt)))]

    def observe(self, one: Pass, step: PassStep, state: State) -> None:
        queries = step.queries[0].double()
        for found, new in ((self.sums, queries.sum(1)), (self.squares, queries.mT @ queries)):
            found[step.layer] = found.get(step.layer, 0) + new

    def directions(self) -> Tensor:
        """The main right singular vector of the queries of each head, [L,H_q,D] float64.

        Its sign is the sign of the queries' mean projection.
        """
        layers = sorted(self.squares)
        vectors = torch.stack([torch.linalg.eigh(self.squares[layer].cpu()).eigenvectors[..., -1] for layer in layers])
        means = torch.stack([self.sums[layer].cpu() for layer in layers])
        return vectors * torch.where((vectors * means).sum(-1, keepdim=True) < 0, -1.0, 1.0)
