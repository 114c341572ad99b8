"""GemFilter: an early layer selects prompt tokens, and only these are prefilled."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.kernels.references import widen
from kvbench.policies.checks import layers_exist, whole_number
from kvbench.policies.pre_passes.pre_pass import PromptChoice
from kvbench.policies.scorers.pooling import check_kernel


@dataclass(frozen=True)
class GemFilter(PromptChoice):
    """Keep the input tokens with the largest products of key and last query in one early layer.

        s_j = sum_h q_(h,T) * k_(h,j)

    Products are summed over all query heads. The policy shortens the prompt and evicts nothing from a cache: kept
    tokens get new positions 0..k-1, and no token is protected, not even BOS.

    layer: index of the layer that selects, from 0. kernel: number of neighbours over which products are averaged.
    Source: Shi et al. 2024, arXiv 2409.17422, algorithm 1: raw products after RoPE, no scale, no softmax.
    """

    layer: int = 13
    kernel: int = 5

    def __post_init__(self) -> None:
        whole_number("layer", self.layer, 0)
        check_kernel(self.kernel)

    def check_layers(self, layers: int) -> None:
        layers_exist("layer", [self.layer], layers)

    def choose(self, queries: Tensor, keys: Tensor, budget: int) -> Tensor:
        heads, tokens, dim = keys.shape
        grouped = (
            widen(queries[:, -1]).view(heads, -1, dim).sum(1)
        )  # sum first, because a group's queries share their keys
        products = torch.einsum("hd,htd->t", grouped, widen(keys))
        pooled = F.avg_pool1d(products[None, None], self.kernel, stride=1, padding=self.kernel // 2)[0, 0]
        order = pooled.argsort(descending=True, stable=True)
        return order[: min(budget, tokens)].sort().values
