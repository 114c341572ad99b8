"""The contract of a pre-pass: what the model computes of a prompt for a policy before anything of it is evicted.

A scorer declares one (`Scorer.pre_pass`), or the policy itself where nothing scores; our own loop makes it
(`kvbench.inference.pre_pass`). There are four kinds: `PromptChoice` chooses the tokens that are read at all,
`TokenRating` has a number for each token from the model's logits, `ExtraPasses` has more tokens look at the prompt, and
`BlockPasses` at each block of it.

Shapes: H_q query heads, H_kv KV heads, T tokens of a prompt, n tokens of a pass, M of a step, V vocabulary, D head dim.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from kvbench.kernels.references import attention_logits, beside_sinks
from kvbench.policies.observation import AttentionParams, Observation, State

ROWS = 256  # queries of a pass whose attention exists at once


class PrePass(ABC):  # noqa: B024 - its kinds have the methods
    """Forward passes for a policy before its eviction; what they find waits in statistics. Frozen dataclasses."""

    statistics: ClassVar[tuple[str, ...]] = ()
    """Numbers per slot that it finds, by name: a scorer reads them in its `state`. 0 for a token it did not see."""

    def check_layers(self, layers: int) -> None:  # noqa: B027 - most name none
        """ValueError if a field names a layer that a model with `layers` of them does not have."""


class PromptChoice(PrePass):
    """Chooses the tokens of a prompt that are read at all, by what one early layer makes of all of them."""

    layer: int
    """The layer whose queries and keys it reads, counted from 0; those after it do not run."""

    @abstractmethod
    def choose(self, queries: Tensor, keys: Tensor, budget: int) -> Tensor:
        """Positions to read, ascending, [min(budget, T)]; queries [H_q,T,D] and keys [H_kv,T,D], rotated."""


class TokenRating(PrePass):
    """A number for every token out of the model's logits, for those of the prompt and for each decoded one.

    Its one statistic holds them. They come out of the very calls that read the tokens: a prompt costs no second pass.
    """

    @abstractmethod
    def rate(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Numbers [...] float32 of tokens [...] under the logits [...,V] before them; a prompt's first token gets 0."""

    def observe(self, observation: Observation, state: State) -> None:
        """Put the numbers of this step's tokens into their slots."""
        ratings = observation.ratings
        if ratings is None:  # at the end of a prompt, whose logits are not known yet
            return
        ratings = ratings.to(observation.positions.device)  # of a model on several devices
        real = observation.query_positions >= 0
        column = real.to(torch.uint8).argmax(-1, keepdim=True)  # [B,1] where a sequence's own tokens begin
        first = observation.query_positions.gather(-1, column)
        entered = observation.positions - first[..., None]  # [B,H_kv,T] its place among this step's tokens
        columns = (entered + column[..., None]).clamp(0, ratings.shape[-1] - 1).long()
        found = ratings[:, None].expand(-1, columns.shape[1], -1).gather(-1, columns)
        new = observation.occupied & (entered >= 0) & real.any(-1)[:, None, None]
        (held,) = (state[name] for name in self.statistics)
        held.copy_(torch.where(new[..., None], found[..., None], held))


class TextEncoder(Protocol):
    """The model's tokenizer, as far as a pre-pass needs it."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, none added before or after."""

    @property
    def turn_end(self) -> str:
        """What the chat template has between a user's words and the answer; a line's end where there is no template."""


class Pass(NamedTuple):
    """The tokens of one extra forward pass, and the positions of the prompt that it is about."""

    tokens: list[int]
    about: range


@dataclass(frozen=True, eq=False)
class PassStep:
    """What one layer did with the tokens of an extra pass, of one sequence.

    queries [1,H_q,n,D], own_keys and own_values [1,H_kv,n,D] are those of the pass's tokens, which stand behind all
    that was seen, at query_positions [1,n]; keys, values [1,H_kv,T,D] are those held, of tokens at positions [1,H_kv,T]
    (-1: an empty slot). hidden [1,n,hidden]: what the layer's attention was given, where the pre-pass `reads_layer`;
    then `params.model` is the layer of the model.
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

    def rows(self, looked_at: Tensor) -> Iterator[Tensor]:
        """Attention [1,H_kv,G,r,slots + n] of some of the pass's queries, over slots [1,H_kv,slots] and the pass."""
        held = self.keys.gather(2, looked_at[..., None].expand(-1, -1, -1, self.keys.shape[-1]))
        keys, params = torch.cat([held, self.own_keys], dim=2), self.params
        own = self.query_positions[:, None].expand(-1, looked_at.shape[1], -1)
        places = torch.cat([self.positions.gather(2, looked_at), own], dim=2)[:, :, None, None]  # [1,H_kv,1,1,·]
        for queries, at in zip(self.queries.split(ROWS, 2), self.query_positions.split(ROWS, 1), strict=True):
            logits = attention_logits(queries, keys, params.scaling, params.softcap)
            sight = (places >= 0) & (places <= at[:, None, None, :, None])
            if params.sliding_window is not None:
                sight &= places > at[:, None, None, :, None] - params.sliding_window
            logits = logits.masked_fill(~sight, -torch.inf)
            yield logits.softmax(-1) if params.sinks is None else _beside(params.sinks, logits)

    def slots(self, about: range) -> Tensor:
        """[1,H_kv,m] where the tokens at some positions lie, all of which are held, in order of position."""
        inside = (self.positions >= about.start) & (self.positions < about.stop)
        order = self.positions.masked_fill(~inside, torch.iinfo(self.positions.dtype).max).argsort(dim=-1, stable=True)
        return order[..., : len(about)]


def _beside(sinks: Tensor, logits: Tensor) -> Tensor:
    """Weights [1,H_kv,G,r,T] where attention sinks, logits [1,H_q] that hold no token, take their part."""
    left = beside_sinks(logits.logsumexp(-1), sinks.view(1, logits.shape[1], -1, 1))
    return logits.softmax(-1) * left[..., None]


class ExtraPasses(PrePass):
    """More forward passes once all of a prompt is held: their tokens attend to all of it, and are stored nowhere."""

    reads_layer: ClassVar[bool] = False
    """Whether it reads the hidden states of its tokens or the layer of the model (`PassStep.hidden`)."""

    @abstractmethod
    def passes(self, prompt: Sequence[int], encoder: TextEncoder) -> list[Pass]:
        """The passes over a prompt [T], in order; encoder: for passes that are made of text."""

    @abstractmethod
    def observe(self, one: Pass, step: PassStep, state: State) -> None:
        """Update the statistics [1,H_kv,T,G'], in place, with what a pass did in a layer. Called for every layer."""


class BlockPasses(ExtraPasses):
    """Passes after each block of a prompt but the last, for a scorer that judges it by the prompt's question.

    The last block holds what is left of the question: where a prompt is read at once there is none. ValueError for
    padding, where the blocks of the sequences of a batch do not end together.
    """

    def passes(self, prompt: Sequence[int], encoder: TextEncoder) -> list[Pass]:
        return []

    @abstractmethod
    def passes_after(self, prompt: Sequence[int], read: int, question: int) -> list[Pass]:
        """The passes after the first `read` tokens of a prompt [T], whose question begins at `question`."""
