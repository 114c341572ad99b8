"""The likelihood of given tokens, and the most tokens that a cache kept while they were scored.

Shapes: n scored tokens, V vocabulary, L layers, H_kv KV heads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.cache.cache import KVCache
from kvbench.engine.logits import NOT_A_NUMBER
from kvbench.policies.pre_passes.surprisal import surprisal
from kvbench.results.samples import Likelihood


@dataclass(frozen=True)
class Scores:
    """The likelihood of given tokens.

    logprobs [n] float32: log p of each token, in nats. greedy [n] bool: whether greedy decoding would choose it. cache:
    at the end; the last token was not appended to it after a prompt. most_kept: while tokens were scored. seconds: from
    the first scored token to the last, without the prompt. block: tokens between two evictions of a text.
    """

    logprobs: Tensor
    greedy: Tensor
    cache: KVCache
    most_kept: MostKept
    seconds: float
    block: int | None = None

    @property
    def nll(self) -> Tensor:
        """-log p of each token, [n] float32."""
        return -self.logprobs

    @property
    def logprob(self) -> float:
        """Sum of log p of all tokens, in nats."""
        return float(self.logprobs.double().sum())


class MostKept:
    """The most tokens that each layer and KV head of a cache kept since this was made; calls may bring several."""

    def __init__(self, cache: KVCache) -> None:
        self._layers = cache.attention_layers
        self._most: dict[int, Tensor] = {}
        cache.sequence.takes_several = True
        cache.sequence.on_change = self._record
        for index, layer in enumerate(self._layers):
            if layer.is_initialized:
                self._record(index)

    @property
    def by_layer(self) -> list[Tensor]:
        """[H_kv] of each layer."""
        return [self._most[index].cpu() for index in range(len(self._layers))]

    def _record(self, index: int) -> None:
        """Called whenever a layer has appended or evicted tokens."""
        kept = self._layers[index].kept_tokens().amax(0)
        self._most[index] = torch.maximum(self._most.get(index, kept), kept)


def score(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """log p of tokens [N] under logits [N,V], [N] float32, and whether each is the most likely token, [N] bool.

    log p is NaN where logits are not numbers: see `NOT_A_NUMBER`.
    """
    tokens, best = tokens.to(logits.device), logits.max(-1)
    logprobs = -surprisal(logits, tokens)
    return torch.where(best.values.isfinite(), logprobs, torch.nan), best.indices == tokens


def joined(scored: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The scores of all calls. Raises FloatingPointError if logits were not numbers."""
    logprobs, greedy = (torch.cat(parts) for parts in zip(*scored, strict=True))
    if bool(logprobs.isnan().any()):
        raise FloatingPointError(NOT_A_NUMBER)
    return logprobs, greedy


def summary(nll: Tensor, first: int, block: int | None, most_kept: Iterable[Tensor]) -> Likelihood:
    """The likelihood of tokens with -log p nll [n] that begin at position `first`; most_kept: [H_kv] per layer.

    Raises FloatingPointError if a token is masked, because no mean exists then.
    """
    if bool(nll.isinf().any()):
        raise FloatingPointError("the model gives a token of the text probability 0 (its logit is -inf)")
    sums = nll.double().cumsum(0).tolist()
    end = first + len(sums)
    lengths = sorted({*(2**k for k in range(1, end.bit_length()) if first < 2**k <= end), end})
    return Likelihood(
        nll=sums[-1] / len(sums),
        tokens=len(sums),
        lengths=lengths,
        cumulative=[sums[length - first - 1] / (length - first) for length in lengths],
        block=block,
        max_kept_tokens=[heads.tolist() for heads in most_kept],
    )
