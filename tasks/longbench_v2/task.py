"""LongBench v2 as a task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvbench.tasks.context_question import rows as columns
from kvbench.tasks.hub import HubFile
from kvbench.tasks.long_sets import Asked, LongSet, Row
from kvbench.tasks.longbench_v2.metrics import RULES
from kvbench.tasks.task import Example, question_part

CHOICES = ("choice_A", "choice_B", "choice_C", "choice_D")
TEMPLATE = """Please read the following text and answer the question below.

<text>
{context}
</text>

What is the correct answer to this question: {question}
Choices:
(A) {choice_A}
(B) {choice_B}
(C) {choice_C}
(D) {choice_D}

Format your response as follows: "The correct answer is (insert answer here)"."""


@dataclass(frozen=True, kw_only=True)
class LongBenchV2(LongSet):
    """503 questions with four choices about texts of 8,000 to 2,000,000 words, asked without reasoning (0shot).

    sha256: of the authors' file. The authors sample at temperature 0.1; here decoding is greedy.
    Source: THUDM/LongBench at 2e00731, prompts/0shot.txt and pred.py.
    """

    name: str = "longbench_v2"
    chat: bool = True
    sha256: str | None = None

    @property
    def file(self) -> HubFile:
        """See `LongSet.file`."""
        return HubFile(self.hub, self.revision, "data.json", self.sha256)

    @property
    def fields(self) -> tuple[str, ...]:
        """See `LongSet.fields`."""
        return ("context", "question", *CHOICES, "answer", "difficulty", "length")

    @property
    def configuration(self) -> str:
        """See `LongSet.configuration`."""
        return "0shot"

    def asked(self, row: Row) -> Iterator[Asked]:
        """See `LongSet.asked`."""
        given = {name: row[name].strip() for name in ("context", "question", *CHOICES)}
        question = question_part(TEMPLATE, "{question}").format(**given)
        yield Asked(TEMPLATE.format(**given), question, (row["answer"],), 128, metadata=_groups(row))

    def of_columns(self, row: columns.Row) -> Mapping[str, Any]:
        """Difficulty and length, where the rows have them."""
        return _groups(row.values)

    def judge(self, output: str, example: Example) -> tuple[float, Mapping[str, Any]]:
        """The score by the protocol's rule."""
        return RULES[self.protocol](output, example.references), {}


def _groups(row: Row) -> dict[str, Any]:
    return {"benchmark": "longbench_v2", **{key: row.get(key) for key in ("difficulty", "length", "domain")}}
