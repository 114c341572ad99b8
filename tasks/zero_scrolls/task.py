"""The ten tasks of ZeroSCROLLS, without scores, because the answers are not public."""

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

    metadata contains the row's `id`, which the website needs. chat: if the model has a template.
    Source: tau-nlp/zero_scrolls; the limits of its API runs are used, as in kvpress's data set.
    """

    benchmark = "zero_scrolls"
    file = "{subset}.zip"
    texts = ("id", "input")

    name: str = "zero_scrolls"
    chat: bool = True

    def row_examples(self, row: Row) -> Iterator[Example]:
        """See `LongSet.row_examples`: the whole input; its question is the text after the document."""
        prompt = row["input"]
        yield self.example(prompt, prompt[row["document_end_index"] :].lstrip(), (), id=row["id"])

    def of_columns(self, row: columns.Row) -> Mapping[str, Any]:
        """The row's id, if it has one."""
        return {"id": row.values.get("id")}

    def judge(self, output: str, example: Example) -> tuple[None, Mapping[str, Any]]:
        """No score."""
        return None, {}
