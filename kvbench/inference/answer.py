"""An answer while it is written: which token comes next, and when it ends.

Shapes: B sequences, V vocabulary.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvbench.inference.sampling import Draws, drawn


class Answer:
    """The new tokens of one sequence, EOS left out.

    It ends at an EOS id, where `stop` says so of its tokens, or after `most`; no EOS is among its first `least` tokens.
    draws: what it draws its tokens by; None: the likeliest is taken.
    """

    def __init__(
        self,
        eos: Sequence[int],
        stop: Callable[[list[int]], bool] | None,
        most: int,
        least: int = 0,
        draws: Draws | None = None,
    ) -> None:
        self.tokens: list[int] = []
        self.done = False
        self.draws = draws
        self._eos, self._stop, self._most, self._least = frozenset(eos), stop, most, least

    @property
    def forbidden(self) -> list[int]:
        """Tokens that may not come next: the EOS ids, while the answer is too short."""
        return sorted(self._eos) if len(self.tokens) < self._least else []

    def take(self, token: int) -> None:
        """One more token."""
        if token in self._eos:
            self.done = True
            return
        self.tokens.append(token)
        self.done = len(self.tokens) >= self._most or bool(self._stop and self._stop(self.tokens))


def choose(logits: Tensor, answers: Sequence[Answer]) -> Tensor:
    """The next token of each sequence, taken by those that go on: [B,V] -> [B,1].

    Reading it is the one moment of a step in which the host waits for the device. Raises FloatingPointError where a
    sequence that goes on has logits that are no numbers.
    """
    tokens, broken = next_tokens(logits, answers)
    for answer, token, wrong in zip(answers, tokens.tolist(), broken, strict=True):
        if answer.done:
            continue
        if wrong:
            raise FloatingPointError(NOT_A_NUMBER)
        answer.take(token)
    return tokens[:, None]


NOT_A_NUMBER = "the model's logits are not numbers (NaN): its weights, or its arithmetic in this dtype, overflow"


def next_tokens(logits: Tensor, answers: Sequence[Answer]) -> tuple[Tensor, list[bool]]:
    """The next token of each sequence [B], the likeliest allowed or a drawn one, and whether its logits are no numbers.

    Sequences that draw do so by the same `Sampling`.
    """
    for index, answer in enumerate(answers):
        if answer.forbidden:
            logits[index, answer.forbidden] = -torch.inf
    best = logits.max(-1)  # NaN is the largest of all
    tokens = best.indices
    sampled = {index: answer.draws for index, answer in enumerate(answers) if answer.draws and not answer.done}
    if sampled:
        rows = list(sampled)
        tokens[rows] = drawn(logits if len(rows) == len(logits) else logits[rows], list(sampled.values()))
    return tokens, best.values.isnan().tolist()
