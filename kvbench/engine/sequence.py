"""A sequence: one example under one policy and budget, from its prompt to its last token.

Shapes: S sequences, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from kvbench.cache.cache import KVCache
from kvbench.engine.answer import NOT_A_NUMBER, Answer, next_tokens
from kvbench.engine.request import Request as Request
from kvbench.policies.policy import Policy
from kvbench.policies.scorers.random import with_example_seed


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
    """A sequence that has seen no token yet."""
    if request.example is not None:
        policy = with_example_seed(policy, *request.example)
    return LiveSequence(request, policy, request.answer())


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
