"""Surprisal of each token under the model."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from kvbench.policies.pre_passes.pre_pass import TokenRating


def surprisal(logits: Tensor, tokens: Tensor) -> Tensor:
    """-log p of tokens [...] under logits [...,V]: [...] float32."""
    tokens = tokens.to(logits.device)  # the output layer may be on another device
    return F.cross_entropy(logits.float().flatten(0, -2), tokens.flatten(), reduction="none").view(tokens.shape)


@dataclass(frozen=True)
class Surprisal(TokenRating):
    """-log p of every token given all previous tokens; 0 for the first token of a prompt."""

    statistics = ("surprisal",)

    def rate(self, logits: Tensor, tokens: Tensor) -> Tensor:
        return surprisal(logits, tokens)
