"""ZeroSCROLLS as a task: one of its ten, answered and not scored, since its answers are not public."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvbench.tasks.context_question import rows as columns
from kvbench.tasks.hub import HubFile
from kvbench.tasks.long_sets import Asked, LongSet, Row
from kvbench.tasks.task import Example, one_of

NEW_TOKENS = {
    "gov_report": 1024,
    "summ_screen_fd": 512,
    "qmsum": 512,
    "squality": 512,
    "book_sum_sort": 256,
    "qasper": 128,
    "narrative_qa": 64,
    "space_digest": 36,
    "musique": 32,
    "quality": 10,
}


@dataclass(frozen=True, kw_only=True)
class ZeroScrolls(LongSet):
    """One task of ZeroSCROLLS. Its outputs go to the benchmark's site, which scores them: a run has no score.

    subset: which. metadata has the row's `id`, which the site asks for. chat: where the model has a template.
    Source: tau-nlp/zero_scrolls; the limits are those of its API runs, which kvpress has in its data set.
    """

    name: str = "zero_scrolls"
    chat: bool = True
    subset: str

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("subset", self.subset, tuple(NEW_TOKENS))

    @property
    def file(self) -> HubFile:
        """See `LongSet.file`."""
        return HubFile(self.hub, self.revision, f"{self.subset}.zip")

    @property
    def fields(self) -> tuple[str, ...]:
        """See `LongSet.fields`."""
        return ("id", "input")

    @property
    def configuration(self) -> str:
        """See `LongSet.configuration`."""
        return self.subset

    def asked(self, row: Row) -> Iterator[Asked]:
        """See `LongSet.asked`: the whole input, whose question is what follows the document."""
        prompt = row["input"]
        question = prompt[row["document_end_index"] :].lstrip()
        yield Asked(prompt, question, (), NEW_TOKENS[self.subset], metadata={"id": row["id"]})

    def of_columns(self, row: columns.Row) -> Mapping[str, Any]:
        """The row's id, where it has one."""
        return {"id": row.values.get("id")}

    def judge(self, output: str, example: Example) -> tuple[None, Mapping[str, Any]]:
        """No score."""
        return None, {}

    def score(self, output: str, example: Example) -> float:
        """ValueError: there are no public answers."""
        raise ValueError(f"{self.name} has no public answers, its outputs are scored by the benchmark's site")
