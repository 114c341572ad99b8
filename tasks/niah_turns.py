"""Several needles in one haystack with one question each: a shared context that needs no data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvbench.errors import ConfigError
from kvbench.tasks.evidence import needle_spans
from kvbench.tasks.niah import Niah, Planted
from kvbench.tasks.shared_context import Question, SharedContext
from kvbench.tasks.task import Example


@dataclass(frozen=True, kw_only=True)
class NiahTurns(SharedContext, Niah):
    """Numbers hidden in one text, with one turn per number: `keys` turns about every text.

    Only the needle of the first turn has a set depth, so samples contain no depth.
    """

    name: str = "niah_turns"
    keys: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.queries > 1:
            raise ConfigError("queries", self.queries, why="is not allowed, each turn requests the numbers of one key")

    def _questions(self, example: Example, planted: Planted) -> Iterator[Example]:
        assert self.max_new_tokens is not None, "a needle task has a default"
        about = {"task": self.name, "length": example.metadata["length"]}
        context = example.prompt.removesuffix(example.question)
        questions = [
            Question(
                text=example.question.replace(planted.question, one.question),
                answer=" " + ", ".join(one.references),
                references=one.references,
                most=self.max_new_tokens,
                prefix=one.answer_prefix,
                spans=needle_spans(context, one.asked, planted.needles),
                metadata=about,
            )
            for one in (planted, *planted.later)
        ]
        yield from self.turns(context, "", questions)
