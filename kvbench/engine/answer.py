"""An answer while it is written: which token comes next, and when it ends.

Shapes: B sequences, V vocabulary.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvbench.engine.sampling import TokenSampler, drawn


class Answer:
    """The new tokens of one sequence, EOS left out.

    It ends at an EOS id, where `stop` says so of its tokens, or after `most`; no EOS is among its first `least` tokens.
    draws: what it draws its tokens by; None: the likeliest is taken. dictated: its first tokens, whatever the model
    says, of which `stop` does not hear.
    """

    def __init__(
        self,
        eos: Sequence[int],
        stop: Callable[[list[int]], bool] | None,
        most: int,
        least: int = 0,
        draws: TokenSampler | None = None,
        dictated: Sequence[int] = (),
    ) -> None:
        self.tokens: list[int] = []
        self.done = False
        self.draws = draws
        self.dictated = dictated
        self._eos, self._stop, self._most, self._least = frozenset(eos), stop, most, least

    @property
    def forbidden(self) -> list[int]:
        """Tokens that may not come next: the EOS ids, while the answer is too short."""
        return sorted(self._eos) if len(self.tokens) < self._least else []

    @property
    def given(self) -> int | None:
        """The token that is dictated next."""
        return self.dictated[len(self.tokens)] if len(self.tokens) < len(self.dictated) else None

    def take(self, token: int) -> None:
        """One more token."""
        if self.given is not None:
            self.tokens.append(token)
            return
        if token in self._eos:
            self.done = True
            return
        self.tokens.append(token)
        own = self.tokens[len(self.dictated) :]
        self.done = len(self.tokens) >= self._most or bool(self._stop and self._stop(own))


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
    """The next token of each sequence [B], dictated, drawn or the likeliest allowed; whether its logits are no numbers.

    Sequences that draw do so by the same `Sampling`.
    """
    for index, answer in enumerate(answers):
        if answer.forbidden:
            logits[index, answer.forbidden] = -torch.inf
    best = logits.max(-1)  # NaN is the largest of all
    tokens = best.indices
    given = {index: token for index, answer in enumerate(answers) if (token := answer.given) is not None}
    sampled = {
        index: answer.draws
        for index, answer in enumerate(answers)
        if answer.draws and not answer.done and index not in given
    }
    if sampled:
        rows = list(sampled)
        tokens[rows] = drawn(logits if len(rows) == len(logits) else logits[rows], list(sampled.values()))
    if given:
        tokens[list(given)] = torch.tensor(list(given.values()), device=tokens.device)
    return tokens, best.values.isnan().tolist()
