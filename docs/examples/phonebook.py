"""A phone book with many names and numbers, and a question about one of them."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from kvbench.errors import whole_number
from kvbench.tasks.task import Example, Task, Tokenizer
from kvbench.tasks.words import own_words


@dataclass(frozen=True, kw_only=True)
class PhoneBook(Task):
    """`entries` lines such as `The secret number of calm-otter is 5512907.` and a question about one.

    entries: number of lines. count: number of prompts.
    """

    name: str = "phonebook"
    entries: int = 20
    count: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number("entries", self.entries, 1)
        whole_number("count", self.count, 1)

    def examples(self, tokenizer: Tokenizer, seed: int, limit: int | None = None) -> Iterator[Example]:
        """Example i depends only on (seed, i), so a larger limit continues a run."""
        for index in range(self.count if limit is None else min(limit, self.count)):
            draw, words = random.Random(f"{seed} {index}"), own_words()
            numbers = draw.sample(range(1_000_000, 10_000_000), self.entries)
            names = [f"{draw.choice(words.adjectives)}-{noun}" for noun in draw.sample(words.nouns, self.entries)]
            wanted = draw.randrange(self.entries)
            lines = [f"The secret number of {name} is {number}." for name, number in zip(names, numbers, strict=True)]
            yield Example(
                index=index,
                prompt=" ".join(lines) + f" What is the secret number of {names[wanted]}?",
                references=(str(numbers[wanted]),),
                max_new_tokens=12,
                answer_prefix=f" The secret number of {names[wanted]} is",
                metadata={"task": self.name, "depth": round(wanted / self.entries, 1)},
            )

    def score(self, output: str, example: Example) -> float:
        """1 if the answer contains the number."""
        return float(example.references[0] in output)
