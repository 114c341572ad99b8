"""What is asked of a sequence: its prompt, and how its answer is written and ends.

Shapes: T prompt tokens, M tokens of a question.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from kvbench.engine.answer import Answer
from kvbench.engine.context import parted
from kvbench.engine.sampling import TokenSampler
from kvbench.policies.pre_passes.pre_pass import TextEncoder


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
    draws: Callable[[], TokenSampler] | None = None
    turns: tuple[int, ...] = ()
    dictated: tuple[int, ...] = ()
    example: tuple[int, int] | None = None

    @property
    def prompt(self) -> Tensor:
        """What policies compress first, [1,T]. Raises ValueError where context or question would be empty."""
        if self.turns:
            return self.input_ids[:, : self.turns[0]]
        return self.input_ids if self.context_tokens is None else parted(self.input_ids, self.context_tokens)[0]

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

    def answer(self) -> Answer:
        """An answer to be written."""
        draws = None if self.draws is None else self.draws()
        return Answer(self.eos_token_ids, self.stop, self.max_new_tokens, self.min_new_tokens, draws, self.dictated)
