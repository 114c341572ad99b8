"""RULER's frequent words: the three most frequent coded words of a text."""

from __future__ import annotations

import string
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvbench.errors import ConfigError, number
from kvbench.tasks.ruler.base import Draws, RulerTask
from kvbench.tasks.ruler.templates import Draft, template
from kvbench.tasks.task import Tokenizer, counts

_REQUESTED = 3


@dataclass(frozen=True, kw_only=True)
class FrequentWords(RulerTask):
    """Coded words with counts proportional to rank ** -alpha; the second to fourth most frequent are requested.

    The most frequent one is written "..." and is noise. alpha: the exponent of the counts. letters: length of a coded
    word. vocabulary: number of distinct coded words, by default one for every 50 tokens of the prompt. All samples of a
    run have the same counts.
    Source: NVIDIA/RULER at c3f5e3b, scripts/data/synthetic/freq_words_extraction.py.
    """

    name: str = "fwe"
    max_new_tokens: int = 50
    alpha: float = 2.0
    letters: int = 6
    vocabulary: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        counts(self, 1, "letters", high=self.length)
        counts(self, _REQUESTED + 1, "vocabulary", high=self.length)
        number("alpha", self.alpha, 1.01, 100)  # at 1 the sum of the counts diverges
        if self._words > len(string.ascii_lowercase) ** self.letters:
            raise ConfigError("letters", self.letters, why=f"is too small for {self._words} different words")
        if self._words <= _REQUESTED:
            least = 50 * (_REQUESTED + 1) + self.length - self.prompt_limit
            raise ConfigError("length", self.length, why=f"is too small for {self.name}, it must be at least {least}")

    @property
    def _words(self) -> int:
        return self.prompt_limit // 50 if self.vocabulary is None else self.vocabulary

    def drafts(self, tokenizer: Tokenizer, draws: Draws) -> Iterator[Draft]:
        """See `RulerTask.drafts`."""
        step = self.prompt_limit // 32
        if step < 1:
            raise self.too_small(template("frequent_words").fill(context="").tokens(tokenizer))
        largest = self._search(step, tokenizer, draws)
        while True:
            coded, size = self._coded_words(draws), largest
            while (draft := self._draft(coded, size, draws)).tokens(tokenizer) > self.prompt_limit:
                size -= step
                if size < 1:
                    raise self.too_small(draft.tokens(tokenizer))
            yield draft

    def _search(self, step: int, tokenizer: Tokenizer, draws: Draws) -> int:
        """The largest number of words, increased step by step, with a prompt below the limit."""
        coded, size = self._coded_words(draws), self.prompt_limit // self.letters
        while self._draft(coded, size, draws).tokens(tokenizer) < self.prompt_limit:
            size += step
        return size - step

    def _coded_words(self, draws: Draws) -> list[str]:
        """Distinct random words, most frequent first."""
        coded = [_coded(self.letters, draws) for _ in range(self._words)]
        while len(set(coded)) < self._words:
            coded.append(_coded(self.letters, draws))
        coded = sorted(set(coded))
        draws.shuffle(coded)
        return ["...", *coded[1:]]

    def _draft(self, coded: list[str], size: int, draws: Draws) -> Draft:
        """A text of about `size` words: counts are rounded down."""
        from scipy.special import zeta  # here: slow to import

        ranks = np.arange(1, len(coded) + 1)
        counts = (size * (ranks**-self.alpha) / zeta(self.alpha)).astype(int)
        words = [word for word, count in zip(coded, counts, strict=True) for _ in range(count)]
        draws.shuffle(words)
        return template("frequent_words").fill(tuple(coded[1 : _REQUESTED + 1]), context=" ".join(words))


def _coded(letters: int, draws: Draws) -> str:
    return "".join(draws.stream.choices(string.ascii_lowercase, k=letters))
