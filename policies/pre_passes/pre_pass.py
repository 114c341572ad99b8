"""The interface of a pre-pass: extra computation over a prompt for a policy before tokens are evicted.

A scorer declares a pre-pass (`Scorer.pre_pass`), or the policy does if it has no scorer; kvbench's generation loop runs
it (`kvbench.engine.pre_pass`). There are four kinds: `PromptChoice` selects the tokens to prefill, `TokenRating`
computes a number for each token from the model's logits, `ExtraPasses` runs more tokens over the prompt, and
`BlockPasses` runs them after each block of it.

Shapes: H_q query heads, H_kv KV heads, T tokens of a prompt, n tokens of a pass, M of a step, V vocabulary, D head dim.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from kvbench.kernels.references import attention_logits, sink_factor
from kvbench.policies.observation import AttentionParams, Observation, State

ROWS = 256  # queries of a pass with attention weights in memory at once


class PrePass(ABC):  # noqa: B024 - its kinds have the methods
    """Forward passes for a policy before its eviction; their results are stored in statistics. Frozen dataclasses."""

    statistics: ClassVar[tuple[str, ...]] = ()
    """Names of the statistics per slot that the pre-pass adds to a scorer's `state`; 0 for tokens without result."""

    def check_layers(self, layers: int) -> None:  # noqa: B027 - most name no layer
        """Raise ValueError if a field names a layer that a model with `layers` layers does not have."""


class PromptChoice(PrePass):
    """Selects the tokens of a prompt to prefill from the queries and keys of one early layer."""

    layer: int
    """Index of the layer that provides queries and keys, from 0; later layers do not run."""

    @abstractmethod
    def choose(self, queries: Tensor, keys: Tensor, budget: int) -> Tensor:
        """Positions to prefill, ascending, [min(budget, T)]; queries [H_q,T,D] and keys [H_kv,T,D], rotated."""


class TokenRating(PrePass):
    """Computes a number for every prompt token and every decoded token from the model's logits.

    The numbers are stored in one statistic. They come from the calls that process the tokens, so a prompt needs no
    second pass.
    """

    @abstractmethod
    def rate(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Rate tokens [...] by the logits [...,V] before them: [...] float32. A prompt's first token gets 0."""

    def observe(self, observation: Observation, state: State) -> None:
        """Store the numbers of this step's tokens in their slots."""
        ratings = observation.shared.get("ratings")
        if ratings is None:  # at the end of a prompt, before its logits are computed
            return
        columns, new = columns_of_new(observation, ratings.shape[-1])
        found = ratings.to(columns.device)[:, None].expand(-1, columns.shape[1], -1).gather(-1, columns)
        (ratings_of_slots,) = (state[name] for name in self.statistics)
        ratings_of_slots.copy_(torch.where(new[..., None], found[..., None], ratings_of_slots))


def columns_of_new(observation: Observation, count: int) -> tuple[Tensor, Tensor]:
    """For every slot, the column of its token among a step's `count` new tokens, and whether it is one, [B,H_kv,T]."""
    real = observation.query_positions >= 0
    column = real.to(torch.uint8).argmax(-1, keepdim=True)  # [B,1] index of a sequence's first token after padding
    first = observation.query_positions.gather(-1, column)
    entered = observation.positions - first[..., None]  # [B,H_kv,T] index among this step's tokens
    new = observation.occupied & (entered >= 0) & real.any(-1)[:, None, None]
    return (entered + column[..., None]).clamp(0, count - 1).long(), new


class TextEncoder(Protocol):
    """The methods of the model's tokenizer that a pre-pass uses."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text without special tokens."""

    @property
    def turn_end(self) -> str:
        """The text between a user message and the answer in the chat template; a newline if there is no template."""


class Pass(NamedTuple):
    """The tokens of one extra forward pass and the prompt positions that it refers to."""

    tokens: list[int]
    about: range


@dataclass(frozen=True, eq=False)
class PassStep:
    """The state of one layer during an extra pass of one sequence.

    queries [1,H_q,n,D], own_keys and own_values [1,H_kv,n,D] belong to the tokens of the pass, which follow all stored
    tokens at query_positions [1,n]. keys, values [1,H_kv,T,D] are stored, at positions [1,H_kv,T] (-1: an empty slot).
    hidden [1,n,hidden]: the input of the layer's attention, if the pre-pass `reads_layer`; `params.model` is then the
    layer of the model.
    """

    layer: int
    queries: Tensor
    own_keys: Tensor
    own_values: Tensor
    keys: Tensor
    values: Tensor
    positions: Tensor
    query_positions: Tensor
    params: AttentionParams
    hidden: Tensor | None = None

    def rows(self, slots: Tensor) -> Iterator[Tensor]:
        """Attention [1,H_kv,G,r,slots + n] of some of the pass's queries, over slots [1,H_kv,slots] and the pass."""
        stored = self.keys.gather(2, slots[..., None].expand(-1, -1, -1, self.keys.shape[-1]))
        keys, params = torch.cat([stored, self.own_keys], dim=2), self.params
        own = self.query_positions[:, None].expand(-1, slots.shape[1], -1)
        places = torch.cat([self.positions.gather(2, slots), own], dim=2)[:, :, None, None]  # [1,H_kv,1,1,·]
        for queries, at in zip(self.queries.split(ROWS, 2), self.query_positions.split(ROWS, 1), strict=True):
            logits = attention_logits(queries, keys, params.scaling, params.softcap)
            visible = (places >= 0) & (places <= at[:, None, None, :, None])
            if params.sliding_window is not None:
                visible &= places > at[:, None, None, :, None] - params.sliding_window
            logits = logits.masked_fill(~visible, -torch.inf)
            yield logits.softmax(-1) if params.sinks is None else _with_sinks(params.sinks, logits)

    def slots(self, about: range) -> Tensor:
        """Slots [1,H_kv,m] of the tokens at these positions, in order; all of them must be stored."""
        inside = (self.positions >= about.start) & (self.positions < about.stop)
        order = self.positions.masked_fill(~inside, torch.iinfo(self.positions.dtype).max).argsort(dim=-1, stable=True)
        return order[..., : len(about)]


def _with_sinks(sinks: Tensor, logits: Tensor) -> Tensor:
    """Attention weights [1,H_kv,G,r,T] with attention sinks, which are logits [1,H_q] without a token."""
    left = sink_factor(logits.logsumexp(-1), sinks.view(1, logits.shape[1], -1, 1))
    return logits.softmax(-1) * left[..., None]


class ExtraPasses(PrePass):
    """Forward passes after prefill. Their tokens attend to the whole prompt and are not stored."""

    reads_layer: ClassVar[bool] = False
    """Whether the pre-pass uses hidden states or the layer of the model (`PassStep.hidden`)."""

    @abstractmethod
    def passes(self, prompt: Sequence[int], encoder: TextEncoder) -> list[Pass]:
        """The passes over a prompt [T], in order; encoder: tokenizer for passes that contain text."""

    @abstractmethod
    def observe(self, one: Pass, step: PassStep, state: State) -> None:
        """Update the statistics [1,H_kv,T,G'] in place with one pass of a layer. Called for every layer."""


class BlockPasses(ExtraPasses):
    """Passes after each block of a prompt except the last, for a scorer that uses the prompt's question.

    The last block contains the rest of the question. A prompt that is prefilled in one call has no such pass. Padding
    raises ValueError, because the blocks of the sequences of a batch must end together.
    """

    def passes(self, prompt: Sequence[int], encoder: TextEncoder) -> list[Pass]:
        return []

    @abstractmethod
    def passes_after(self, prompt: Sequence[int], processed: int, question: int) -> list[Pass]:
        """The passes after the first `processed` tokens of a prompt [T] with a question that begins at `question`."""
