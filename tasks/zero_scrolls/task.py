"""ZeroSCROLLS as a task: one of its ten, without scores, because the answers are not public."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvbench.tasks.context_question import rows as columns
from kvbench.tasks.long_sets import LongSet
from kvbench.tasks.task import Example
from kvbench.tasks.text_files import Row


@dataclass(frozen=True, kw_only=True)
class ZeroScrolls(LongSet):
    """One task of ZeroSCROLLS. Its outputs are scored on the benchmark's website; a run has no score.

    metadata contains the row's `id`, which the website needs. chat: where the model has a template.
    Source: tau-nlp/zero_scrolls; the limits are those of its API runs, which kvpress has in its data set.
    """

    benchmark = "zero_scrolls"
    file = "{subset}.zip"
    texts = ("id", "input")

    name: str = "zero_scrolls"
    chat: bool = True

    def asked(self, row: Row) -> Iterator[Example]:
        """See `LongSet.asked`: the whole input, whose question is what follows the document."""
        prompt = row["input"]
        yield self.example(prompt, prompt[row["document_end_index"] :].lstrip(), (), id=row["id"])

    def of_columns(self, row: columns.Row) -> Mapping[str, Any]:
        """The row's id, where it has one."""
        return {"id": row.values.get("id")}

    def judge(self, output: str, example: Example) -> tuple[None, Mapping[str, Any]]:
        """No score."""
        return None, {}
