"""LongBench v2 as a task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvbench.tasks.context_question import rows as columns
from kvbench.tasks.long_sets import LongSet
from kvbench.tasks.longbench_v2.summary import RULES
from kvbench.tasks.task import Example, question_part
from kvbench.tasks.text_files import Row

CHOICES = ("choice_A", "choice_B", "choice_C", "choice_D")


@dataclass(frozen=True, kw_only=True)
class LongBenchV2(LongSet):
    """503 questions with four choices about texts of 8,000 to 2,000,000 words, answered without reasoning (0shot).

    The authors sample at temperature 0.1; here decoding is greedy.
    Source: THUDM/LongBench at 2e00731, prompts/0shot.txt and pred.py.
    """

    benchmark = "longbench_v2"
    file = "data.json"
    texts = ("context", "question", *CHOICES, "answer", "difficulty", "length")
    summed_by = "longbench_v2"

    name: str = "longbench_v2"
    chat: bool = True
    subset: str = field(init=False, default="0shot")

    def row_examples(self, row: Row) -> Iterator[Example]:
        """See `LongSet.row_examples`."""
        given = {name: row[name].strip() for name in ("context", "question", *CHOICES)}
        question = question_part(self.template, "{question}").format(**given)
        yield self.example(self.template.format(**given), question, (row["answer"],), **_groups(row))

    def of_columns(self, row: columns.Row) -> Mapping[str, Any]:
        """Difficulty and length, if the rows have them."""
        return _groups(row.values)

    def judge(self, output: str, example: Example) -> tuple[float, Mapping[str, Any]]:
        """The score by the protocol's rule."""
        return RULES[self.protocol](output, example.references), {}


def _groups(row: Row) -> dict[str, Any]:
    return {key: row.get(key) for key in ("difficulty", "length", "domain")}
