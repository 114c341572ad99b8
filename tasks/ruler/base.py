"""Base of all RULER tasks: seeded draws, the search for the largest prompt that fits, and the scorer.

Random numbers are drawn in the official order, so that the same seed, tokenizer and word lists give the official
prompts. The size search consumes random numbers, so the first prompt depends on the tokenizer and on the search.
"""

from __future__ import annotations

import random
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

import numpy as np

from kvbench.errors import choice, counted
from kvbench.tasks.ruler.templates import Draft
from kvbench.tasks.scores import contains
from kvbench.tasks.task import Example, Task, Tokenizer, counts
from kvbench.tasks.words import Words, official_words, own_words

_CONTROL = re.compile(r"[\x00-\x1f]")
_RETRIES = 20  # draws of the smallest size before an error; the official loop is endless


@dataclass(frozen=True)
class Draws:
    """The random streams of one run of a generator. The official scripts seed Python's and numpy's global streams."""

    seed: int
    stream: random.Random
    numpy_stream: np.random.RandomState

    @classmethod
    def seeded(cls, seed: int) -> Draws:
        """Streams equal to the global ones after `random.seed(seed)` and `numpy.random.seed(seed)`."""
        return cls(seed=seed, stream=random.Random(seed), numpy_stream=np.random.RandomState(seed))

    def shuffle(self, items: list[str]) -> None:
        """Shuffle in place with a new stream: RULER uses the same permutation for every sample of a task."""
        random.Random(self.seed).shuffle(items)


def clean_up(output: str) -> str:
    """Strip, turn every control character into a newline, strip again.

    Source: NVIDIA/RULER at c3f5e3b, scripts/eval/evaluate.py.
    """
    return _CONTROL.sub("\n", output.strip()).strip()


@dataclass(frozen=True, kw_only=True)
class RulerTask(Task):
    """A generator of prompts that fill `length` tokens: prompt, answer prefix and the tokens to generate together.

    length: tokens of prompt, answer prefix and answer. samples: number of examples (500 in the released configuration,
    with seed 42). official: draw from the word lists of wonderwords 3.0.1 instead of ours; with the same seed and
    tokenizer the prompts are then the official ones, byte for byte. data_dir: folder with RULER's data files, for
    tasks that read one. template_tokens: tokens to leave free for the model's chat template. max_new_tokens: tokens of
    the answer. answer_prefix: begin the answer with the official text, which leaves no room for a thought; the prompts
    are the same without it.
    Raises ValueError if even the smallest prompt exceeds `length`; the official scripts do not terminate in this case.
    Source: NVIDIA/RULER at c3f5e3b, scripts/synthetic.yaml and scripts/data/synthetic.
    """

    length_field: ClassVar[str | None] = "length"

    chat: bool = True
    length: int = 4096
    samples: int = 500
    official: bool = False
    data_dir: str | None = None
    template_tokens: int = 0
    answer_prefix: bool = True
    max_new_tokens: int

    def __post_init__(self) -> None:
        super().__post_init__()
        counts(self, 1, "length", "samples")
        choice("answer_prefix", self.answer_prefix, True, False)
        counts(self, 0, "template_tokens", "max_new_tokens")  # 0: a worked example generates nothing

    @abstractmethod
    def drafts(self, tokenizer: Tokenizer, draws: Draws) -> Iterator[Draft]:
        """An endless stream of drafts, each of at most `prompt_limit` tokens."""

    @property
    def prompt_limit(self) -> int:
        """The maximum number of tokens of prompt and answer prefix."""
        return self.length - self.template_tokens - self.max_new_tokens

    @property
    def word_lists(self) -> Words:
        """Our word lists, or the official ones."""
        return official_words() if self.official else own_words()

    def examples(self, tokenizer: Tokenizer, seed: int, limit: int | None = None) -> Iterator[Example]:
        """See `Task.examples`."""
        count = self.samples if limit is None else min(limit, self.samples)
        for index, draft in enumerate(islice(self.drafts(tokenizer, Draws.seeded(seed)), count)):
            used = draft.tokens(tokenizer) + self.max_new_tokens
            yield Example(
                index=index,
                prompt=draft.prompt,
                references=draft.references,
                max_new_tokens=self.max_new_tokens,
                answer_prefix=draft.answer_prefix if self.answer_prefix else "",
                question=draft.question,
                spans=draft.spans,
                metadata={"task": self.name, "benchmark": "ruler", "length": self.length, "used": used},
            )

    def score(self, output: str, example: Example) -> float:
        """Share of the references found in the cleaned output."""
        return contains(clean_up(output), example.references)

    def too_small(self, needed: int) -> ValueError:
        """The error for a length that is too small for any prompt of this task."""
        return ValueError(
            f"length={self.length} is too small for {self.name}: its smallest prompt takes "
            f"{counted(needed, 'token')} and "
            f"{self.max_new_tokens + self.template_tokens} more are kept for the answer and the chat template"
        )


@dataclass(frozen=True, kw_only=True)
class SizedTask(RulerTask):
    """A RULER task with prompts of a number of lines or words, which a binary search finds."""

    @property
    @abstractmethod
    def step(self) -> int:
        """The smallest size, and the reduction of a prompt that is too long."""

    @abstractmethod
    def draft(self, size: int, draws: Draws) -> Draft:
        """Draw one prompt of `size` lines or words."""

    def upper_bound(self, tokenizer: Tokenizer, draws: Draws) -> int:
        """The largest size of the search: three times an estimate from one smallest prompt."""
        tokens_per_unit = self.draft(self.step, draws).tokens(tokenizer) / self.step
        return int((self.length - self.template_tokens) / tokens_per_unit * 3)

    def drafts(self, tokenizer: Tokenizer, draws: Draws) -> Iterator[Draft]:
        """See `RulerTask.drafts`."""
        size = self.search(tokenizer, draws, self.prompt_limit)
        while True:
            yield self.fitting(size, lambda size: self.draft(size, draws), tokenizer)

    def search(self, tokenizer: Tokenizer, draws: Draws, limit: int) -> int:
        """The largest size with a draw of at most `limit` tokens."""
        low, high, best = self.step, max(self.upper_bound(tokenizer, draws), 2 * self.step), self.step
        while low <= high:
            middle = (low + high) // 2
            if self.draft(middle, draws).tokens(tokenizer) <= limit:
                best, low = middle, middle + 1
            else:
                high = middle - 1
        return best

    def fitting(self, size: int, draft: Callable[[int], Draft], tokenizer: Tokenizer) -> Draft:
        """A draw of `size` or less that fits; each failure reduces the size by one step."""
        tries = 0
        while tries < _RETRIES:
            drawn = draft(size)
            tokens = drawn.tokens(tokenizer)
            if tokens <= self.prompt_limit:
                return drawn
            size, tries = (size - self.step, 0) if size > self.step else (size, tries + 1)
        raise self.too_small(tokens)
