"""A task with no examples of its own, and a chat template whose prompts show where a message begins and ends."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvbench.tasks.task import Example, Task, Tokenizer

TEMPLATE = "<s>[{% for m in messages %}{{ m.content }}{% endfor %}]{% if add_generation_prompt %}>{% endif %}"


@dataclass(frozen=True, kw_only=True)
class Given(Task):
    """Prompts are made from the examples of a test."""

    name: str = "given"

    def examples(self, tokenizer: Tokenizer, seed: int, limit: int | None = None) -> Iterator[Example]:
        return iter(())

    def score(self, output: str, example: Example) -> float:
        return 0.0
