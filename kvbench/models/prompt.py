"""The prompt of an example: its tokens, and how many of them a policy compresses, scores and shares."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from itertools import accumulate

from torch import Tensor

from kvbench.models.spans import Spans
from kvbench.models.tokens import Pair
from kvbench.tasks.task import Example


@dataclass(frozen=True)
class Prompt:
    """The prompt of one example: token ids [T] int32, and the sha256 of their text.

    The example has no text here, because all prompts of a run are in memory at once.
    target [M] int32: tokens to score as the continuation, if the example has a target. pairs: contexts to compress and
    continuations to rate, if the example has them; ids is then the longest context.
    context_tokens: number of tokens that are compressed before the question; None: the whole prompt is compressed.
    dictated: token ids at the beginning of the answer, independent of the model.
    sample: number of the answer, from 0, if several are sampled; example.index then counts answers.
    question: position of the question in a prompt that is compressed as a whole, if the policy needs it.
    turns: for a conversation, the number of tokens of each turn's prompt, which are concatenated in ids.
    given: tokens that are fed as the whole answer, whose divergence is measured.
    spans: token positions of the parts that the example names. opened: the answer begins inside a thought.
    """

    example: Example
    ids: Tensor
    hash: str
    target: Tensor | None = None
    pairs: tuple[Pair, ...] = ()
    context_tokens: int | None = None
    sample: int | None = None
    question: int | None = None
    turns: tuple[int, ...] = ()
    dictated: tuple[int, ...] = ()
    given: tuple[int, ...] = ()
    spans: Spans = field(default_factory=dict)
    opened: bool = False

    @property
    def most_new_tokens(self) -> int:
        """The maximum number of new tokens, including dictated ones."""
        return self.example.max_new_tokens + len(self.dictated)

    @property
    def context_hash(self) -> str | None:
        """The sha256 of tokens that several prompts share: a context, a first turn, or a whole prompt."""
        if not self.turns and self.context_tokens is None and self.sample is None:
            return None
        first = self.turns[0] if self.turns else self.context_tokens
        return hashlib.sha256(self.ids[:first].numpy().tobytes()).hexdigest()

    @property
    def draw(self) -> int:
        """A seed for random policies: the example's index, or a number derived from a shared context."""
        if not self.turns and self.context_tokens is None:
            return self.example.index
        return int(str(self.context_hash)[:15], 16) + (self.sample or 0)

    @property
    def is_scored(self) -> bool:
        """Whether its tokens are given and scored, so that nothing is generated."""
        return self.target is not None or (self.example.reading is not None and not self.given)

    @property
    def is_whole_text(self) -> bool:
        """Whether all tokens but the first are scored, while the policy evicts block by block."""
        reading = self.example.reading
        return self.target is None and reading is not None and reading.prompt_tokens is None

    @property
    def tokens(self) -> int:
        """Number of all given tokens: those of a target follow the prompt."""
        return len(self.ids) + (0 if self.target is None else len(self.target))

    @property
    def largest_token(self) -> int:
        """The largest id of all given tokens."""
        rated = [token for pair in self.pairs for token in (*pair.context, *pair.continuation)]
        parts = [ids for ids in (self.ids, self.target) if ids is not None and len(ids)]
        return max([*rated, *self.dictated, *self.given, *(int(ids.max()) for ids in parts)])

    @property
    def continuation(self) -> Tensor | None:
        """The tokens [M] after the prompt that are scored; None if an answer is generated, or a whole text scored."""
        if self.target is not None or self.is_whole_text or not self.is_scored:
            return self.target
        return self.ids[self.length :]

    @property
    def own(self) -> bool:
        """Whether the history of the conversation has the model's own answers, which are not part of ids."""
        return self.example.shared is not None and self.example.shared.own

    @property
    def known(self) -> int:
        """Number of tokens that an earlier question about the same context shares; 0 for the first question."""
        if self.context_tokens is not None and self.example.metadata.get("turn", 1) > 1:
            return self.context_tokens
        return sum(self.turns[:-1])

    @property
    def lengths(self) -> dict[int, int]:
        """The length of each prompt that the policy compresses, in tokens, and where its newest turn begins."""
        turns = {end: end - turn for end, turn in zip(accumulate(self.turns), self.turns, strict=True)}
        return dict.fromkeys((len(pair.context) for pair in self.pairs), 0) or turns or {self.length: 0}

    @property
    def length(self) -> int:
        """Number of tokens of the prompt: of the context, or of the part of a text that is not scored."""
        if self.context_tokens is not None:
            return self.context_tokens
        reading = self.example.reading
        return len(self.ids) if reading is None or reading.prompt_tokens is None else reading.prompt_tokens
