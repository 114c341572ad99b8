"""A row: one request under one policy, from its prompt to its last token.

Shapes: R rows, T prompt tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from kvbench.cache.cache import KVCache
from kvbench.inference.answer import NOT_A_NUMBER, Answer, likeliest
from kvbench.inference.context import parted
from kvbench.policies.policy import Policy


@dataclass(frozen=True)
class Request:
    """One example to be answered, input_ids [1,T]: what all of its variants have in common.

    context_tokens: so many of them are the policies' prompt, the others a question about it; None: all are the prompt.
    """

    input_ids: Tensor
    max_new_tokens: int
    min_new_tokens: int = 0
    eos_token_ids: tuple[int, ...] = ()
    stop: Callable[[list[int]], bool] | None = None
    context_tokens: int | None = None

    @property
    def prompt(self) -> Tensor:
        """What policies compress, [1,T]. Raises ValueError where context or question would be empty."""
        return self.input_ids if self.context_tokens is None else parted(self.input_ids, None, self.context_tokens)[0]


@dataclass(eq=False)
class LiveSequence:
    """A request under one policy.

    cache: None where the policy could not open one, and while the row is decoded in one cache with others. sharing: how
    many rows the reading of its prompt served. error: why it ended early, if it did; nothing else is to be read off it
    then. decode_steps: tokens fed after the prompt.
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
    """A row that has read nothing yet."""
    answer = Answer(request.eos_token_ids, request.stop, request.max_new_tokens, request.min_new_tokens)
    return LiveSequence(request, policy, answer)


def take_next(rows: Sequence[LiveSequence], logits: Tensor) -> None:
    """Let every row take its next token; logits [R,V], or [1,V] where all rows have the same.

    A row whose logits are no numbers ends with a FloatingPointError.
    """
    if len(logits) < len(rows):
        logits = logits.repeat(len(rows), 1)
    tokens, broken = likeliest(logits, [row.answer for row in rows])
    for index, (row, token, wrong) in enumerate(zip(rows, tokens.tolist(), broken, strict=True)):
        if row.error is None and wrong:
            row.error = FloatingPointError(NOT_A_NUMBER)
        if row.error is None:
            row.answer.take(token)
            row.logits = logits[index : index + 1].clone() if row.policy.needs.surprisal else None
