"""A sequence: one example under one policy and budget, from its prompt to its last token.

Shapes: S sequences, T prompt tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from torch import Tensor

from kvbench.cache.cache import KVCache
from kvbench.inference.answer import NOT_A_NUMBER, Answer, next_tokens
from kvbench.inference.context import parted
from kvbench.inference.sampling import Draws
from kvbench.policies.policy import Policy
from kvbench.policies.pre_passes.pre_pass import TextEncoder
from kvbench.policies.scorers.random import drawing_anew


@dataclass(frozen=True)
class Request:
    """One example to be answered, input_ids [1,T]: what all of its variants have in common.

    context_tokens: so many of them are the policies' prompt, the others a question about it; None: all are the prompt.
    question: where the question in the prompt begins, for policies that ask. encoder: for policies with a pre-pass that
    is made of text. draws: makes what an answer draws its tokens by; None: decoding is greedy. turns: of a conversation
    the tokens of each turn's prompt, the answered one last; () elsewhere. dictated: tokens with which its answer
    begins, among max_new_tokens and min_new_tokens. example: the run's seed and the index of the example, by which
    policies draw random numbers; None: by their own seed alone.
    """

    input_ids: Tensor
    max_new_tokens: int
    min_new_tokens: int = 0
    eos_token_ids: tuple[int, ...] = ()
    stop: Callable[[list[int]], bool] | None = None
    context_tokens: int | None = None
    question: int | None = None
    encoder: TextEncoder | None = None
    draws: Callable[[], Draws] | None = None
    turns: tuple[int, ...] = ()
    dictated: tuple[int, ...] = ()
    example: tuple[int, int] | None = None

    @property
    def prompt(self) -> Tensor:
        """What policies compress first, [1,T]. Raises ValueError where context or question would be empty."""
        if self.turns:
            return self.input_ids[:, : self.turns[0]]
        return self.input_ids if self.context_tokens is None else parted(self.input_ids, None, self.context_tokens)[0]

    @property
    def later(self) -> Tensor:
        """What follows a context, [1,M]; nothing where all is prompt."""
        return self.input_ids[:, self.input_ids.shape[1] if self.turns else self.prompt.shape[1] :]

    @property
    def prompts(self) -> tuple[Tensor, ...]:
        """The prompt of each turn, [1,T]."""
        return tuple(
            self.input_ids[:, end - size : end] for size, end in zip(self.turns, accumulate(self.turns), strict=True)
        )


@dataclass(eq=False)
class LiveSequence:
    """A request under one policy.

    cache: None where the policy could not open one, and while it is decoded in one cache with others. sharing: how many
    sequences its prefill served. error: why it ended early, if it did; nothing else is valid then. decode_steps: tokens
    fed after the prompt.
    """

    request: Request
    policy: Policy
    answer: Answer
    cache: KVCache | None = None
    sharing: int = 1
    decode_steps: int = 0
    error: Exception | None = None
    position: int = field(default=0, repr=False)  # where its next token stands
    logits: Tensor | None = field(default=None, repr=False)  # [1,V] after its last token, where its policy reads them

    @property
    def tokens(self) -> list[int]:
        """The new tokens, EOS left out."""
        return self.answer.tokens

    @property
    def done(self) -> bool:
        """Whether no token follows."""
        return self.error is not None or self.answer.done


def new_sequence(request: Request, policy: Policy) -> LiveSequence:
    """A sequence that has read nothing yet."""
    draws = None if request.draws is None else request.draws()
    most, least = request.max_new_tokens, request.min_new_tokens
    answer = Answer(request.eos_token_ids, request.stop, most, least, draws, request.dictated)
    policy = policy if request.example is None else drawing_anew(policy, *request.example)
    return LiveSequence(request, policy, answer)


def choose_next(sequences: Sequence[LiveSequence], logits: Tensor) -> None:
    """Let every sequence take its next token; logits [S,V], or [1,V] where all sequences have the same.

    A sequence whose logits are no numbers ends with a FloatingPointError.
    """
    if len(logits) < len(sequences):
        logits = logits.repeat(len(sequences), 1)
    tokens, broken = next_tokens(logits, [sequence.answer for sequence in sequences])
    for index, (sequence, token, wrong) in enumerate(zip(sequences, tokens.tolist(), broken, strict=True)):
        if sequence.error is None and wrong:
            sequence.error = FloatingPointError(NOT_A_NUMBER)
        if sequence.error is None:
            sequence.answer.take(token)
            sequence.logits = logits[index : index + 1].clone() if sequence.policy.rates else None
