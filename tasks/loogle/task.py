"""LooGLE as a task: one of its four."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.tasks.context_question import rows as columns
from kvbench.tasks.hub import HubFile
from kvbench.tasks.long_sets import Asked, LongSet, Row
from kvbench.tasks.loogle.metrics import CLOZE, TASKS, cloze, metric, similarities, sound_cloze
from kvbench.tasks.predictions import RAISED
from kvbench.tasks.task import Example, one_of, question_part

NEW_TOKENS = {"shortdep_qa": 300, "longdep_qa": 500, CLOZE: 50, "longdep_summarization": 500}
_QA = "Please answer the question based on the long texts below. \n{input}\nQuestion: {Q}\nAnswer: "
TEMPLATES = {
    "shortdep_qa": _QA,
    "longdep_qa": _QA,
    "longdep_summarization": "Please generate a summary of the below paper. \n{input}\n Summarization: ",
    CLOZE: (
        "Please fill in the clozes based on the given long texts below. Each of the placeholder '<mask-n>' in the "
        "question could be an entity of Person, Location or Organiocation. The same masks represent the same entity. "
        "Output a json format answer, for example: {{'<mask-0>': 'Bob', '<mask-1>': 'Gorrosion Magazine',"
        "'<mask-2>': 'Bethel Horizon'}}\n{input}\n Question: {Q} What are the masked entities? \nAnswer:"
    ),
}


@dataclass(frozen=True, kw_only=True)
class LooGLE(LongSet):
    """One task of LooGLE.

    subset: which. chat: the authors give the plain prompt. They decode with a repetition penalty of 2, which is not
    done here. An answer on which the authors' scorer raises counts as kvpress counts it.
    Source: bigai-nlco/LooGLE at 6734382, config/ and Prediction/pred_opensource_models.py.
    """

    name: str = "loogle"
    subset: str

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("subset", self.subset, TASKS)

    @property
    def file(self) -> HubFile:
        """See `LongSet.file`."""
        return HubFile(self.hub, self.revision, f"data/{self.subset}.json")

    @property
    def fields(self) -> tuple[str, ...]:
        """See `LongSet.fields`."""
        return ("input",)

    @property
    def configuration(self) -> str:
        """See `LongSet.configuration`."""
        return self.subset

    def asked(self, row: Row) -> Iterator[Asked]:
        """See `LongSet.asked`: all questions about a document."""
        template = TEMPLATES[self.subset]
        part = question_part(template, "{Q}", "{input}")
        for question, answer in _pairs(row):
            reference = json.dumps(answer, ensure_ascii=False) if isinstance(answer, dict) else answer
            prompt, asked = template.format(input=row["input"], Q=question), part.format(Q=question)
            yield Asked(prompt, asked, (reference,), NEW_TOKENS[self.subset], metadata=self._metadata)

    def of_columns(self, row: columns.Row) -> Mapping[str, Any]:
        """The module that sums up."""
        return self._metadata

    def judge(self, output: str, example: Example) -> tuple[float, Mapping[str, Any]]:
        """The score, and by name every metric; of clozes (hits, blanks)."""
        pair = output, example.references[0]
        if self.subset != CLOZE:
            try:
                found = similarities(*pair, self.protocol)
            except RAISED:
                found = similarities(*pair, "kvpress")
            return found[metric(self.subset)], found
        kept = {name: count for name, count in cloze(*pair, self.protocol).items() if count is not None}
        counts = {**cloze(*pair, "kvpress"), **kept}  # where the authors have no count, kvpress's
        sound = {f"{name}_sound": count for name, count in sound_cloze(*pair).items()}
        hits, blanks = kept["exact_match"]
        return hits / blanks, {**counts, **sound}

    @property
    def _metadata(self) -> dict[str, str]:
        return {"benchmark": "loogle"}


def _pairs(row: Row) -> Sequence[tuple[str, Any]]:
    """Questions and answers of a row, whose list is written as Python in a text; a paper has its summary alone."""
    pairs = row["qa_pairs"]
    if pairs == "none":
        return [("", row["output"])]
    listed = ast.literal_eval(pairs) if isinstance(pairs, str) else pairs
    return [(one["Q"], one["A"]) for one in listed]
