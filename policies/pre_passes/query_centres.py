"""The mean and the mean size of a model's queries before rotation, computed once per model for TriAttention.

Shapes: L layers, H_q query heads, n tokens of a pass, D head dim, F = D / 2 frequencies.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvbench.policies.observation import State
from kvbench.policies.pre_passes.pre_pass import ExtraPasses, Pass, PassStep, TextEncoder


@dataclass(frozen=True)
class QueryCentres(ExtraPasses):
    """Sums of q and |q| over the queries of a text before rotation, per layer, query head and frequency.

    Two channels that are rotated together are one complex number q. The queries are taken before rotation, after the
    model's query norm if it has one. The prompt is the first token of the text, which is not counted, and the pass is
    the rest. One object may process several texts.

    text: the tokens after the first.
    """

    reads_layer = True

    text: tuple[int, ...]
    sums: dict[int, Tensor] = field(default_factory=dict, compare=False)  # by layer, [H_q,F] complex128
    sizes: dict[int, Tensor] = field(default_factory=dict, compare=False)  # [H_q,F] float64
    counts: dict[int, int] = field(default_factory=dict, compare=False)
    interleaved: dict[int, bool] = field(default_factory=dict, compare=False)

    def passes(self, prompt: Sequence[int], encoder: TextEncoder) -> list[Pass]:
        return [Pass(list(self.text), range(len(prompt)))]

    def observe(self, one: Pass, step: PassStep, state: State) -> None:
        assert step.params.model is not None, "declared by reads_layer"
        rotation = step.params.model.rotation(step.query_positions[:, None])
        rotated, dim = 2 * rotation.cos.shape[-1], step.queries.shape[-1]
        if rotated != dim:
            raise ValueError(
                f"this model rotates {rotated} of {dim} channels of a head in layer {step.layer}; query statistics "
                "exist only for models that rotate all of them"
            )
        queries = rotation.inverse().apply(step.queries)[0].double()
        pairs = queries.unflatten(-1, (-1, 2)) if rotation.interleaved else queries.unflatten(-1, (2, -1)).mT
        values = torch.view_as_complex(pairs.contiguous())  # [H_q,n,F]
        layer = step.layer
        self.sums[layer] = self.sums.get(layer, 0) + values.sum(1)
        self.sizes[layer] = self.sizes.get(layer, 0) + values.abs().sum(1)
        self.counts[layer] = self.counts.get(layer, 0) + values.shape[1]
        self.interleaved[layer] = rotation.interleaved
