"""RULER's common words: the ten most frequent words of a long numbered list."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvbench.errors import ConfigError
from kvbench.tasks.ruler.base import Draws, SizedTask
from kvbench.tasks.ruler.templates import Draft, template
from kvbench.tasks.task import Tokenizer, counts
from kvbench.tasks.words import official_second_list

_ESTIMATE = 4096  # words of the prompt from which the size search starts


@dataclass(frozen=True, kw_only=True)
class CommonWords(SizedTask):
    """A numbered list in which `common` words occur `common_repeats` times and all others `other_repeats` times.

    A worked example precedes the list. Below 4096 tokens the counts are 6 and 1, as in the official generator. The
    shuffle depends only on the seed, so the common words have the same positions in every sample.
    common: number of words that occur often. common_repeats, other_repeats: how often a word occurs.
    Source: NVIDIA/RULER at c3f5e3b, scripts/data/synthetic/common_words_extraction.py.
    """

    name: str = "cwe"
    max_new_tokens: int = 120
    common: int = 10
    common_repeats: int = 30
    other_repeats: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        counts(self, 1, "common", "common_repeats", "other_repeats", high=self.length)
        if self.common > self.step:
            raise ConfigError("common", self.common, why=f"is too large, the smallest list has {self.step} words")

    @property
    def step(self) -> int:
        """Distinct words."""
        return 10

    def upper_bound(self, tokenizer: Tokenizer, draws: Draws) -> int:
        """Twice an estimate from one long list."""
        size = _ESTIMATE if self.official else min(_ESTIMATE, len(self.word_lists.words))
        tokens_per_word = self.draft(size, draws).tokens(tokenizer) / size
        return int((self.length - self.template_tokens) // tokens_per_word) * 2

    def draft(self, size: int, draws: Draws) -> Draft:
        """One worked example and one list of `size` distinct words."""
        if self.length < 4096:
            worked, answer = self._list(20, 3, 1, draws)
            listed, references = self._list(size, 6, 1, draws)
        else:
            worked, answer = self._list(40, 10, 3, draws)
            listed, references = self._list(size, self.common_repeats, self.other_repeats, draws)
        texts = template("common_words")
        shown, draft = texts.fill(context=worked), texts.fill(tuple(references), context=listed)
        worked_out = f"{shown.prompt}{shown.answer_prefix} {_numbered(answer)}\n"
        return replace(draft, prompt=worked_out + draft.prompt)

    def _list(self, size: int, common_repeats: int, other_repeats: int, draws: Draws) -> tuple[str, list[str]]:
        """(numbered list, its common words)."""
        drawn = draws.stream.sample(self._vocabulary(size, draws), size)
        common, others = drawn[: self.common], drawn[self.common :]
        repeated = common * common_repeats + others * other_repeats
        draws.shuffle(repeated)
        return _numbered(repeated), common

    def _vocabulary(self, size: int, draws: Draws) -> list[str]:
        """The words to draw from: the second list if the first is too short."""
        words = list(self.word_lists.words)
        if size > len(words):
            return official_second_list(self.data_dir) if self.official else self.word_lists.compounds
        draws.shuffle(words)
        return words


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))
