"""Surprisal of each token under the model."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from kvbench.policies.pre_passes.pre_pass import TokenRating


@dataclass(frozen=True)
class Surprisal(TokenRating):
    """-log p of every token given all previous tokens; 0 for the first token of a prompt."""

    statistics = ("surprisal",)

    def rate(self, logits: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(logits.float().flatten(0, -2), tokens.flatten(), reduction="none").view(tokens.shape)
