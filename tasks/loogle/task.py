"""The four tasks of LooGLE."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.tasks.long_sets import LongSet
from kvbench.tasks.loogle.metrics import CLOZE, cloze, metric, similarities, sound_cloze
from kvbench.tasks.predictions import RAISED
from kvbench.tasks.task import Example, question_part
from kvbench.tasks.text_files import Row


@dataclass(frozen=True, kw_only=True)
class LooGLE(LongSet):
    """One task of LooGLE.

    chat: the authors use the plain prompt. They decode with a repetition penalty of 2, which kvbench does not apply. If
    the authors' scorer raises an error, kvpress's score is used.
    Source: bigai-nlco/LooGLE at 6734382, config/ and Prediction/pred_opensource_models.py.
    """

    benchmark = "loogle"
    file = "data/{subset}.json"
    texts = ("input",)
    summed_by = "loogle"

    name: str = "loogle"

    def row_examples(self, row: Row) -> Iterator[Example]:
        """See `LongSet.row_examples`: all questions about a document."""
        part = question_part(self.template, "{Q}", "{input}")
        for question, answer in _pairs(row):
            reference = json.dumps(answer, ensure_ascii=False) if isinstance(answer, dict) else answer
            prompt = self.template.format(input=row["input"], Q=question)
            yield self.example(prompt, part.format(Q=question), (reference,))

    def judge(self, output: str, example: Example) -> tuple[float, Mapping[str, Any]]:
        """The score, and every metric by name; (hits, blanks) for clozes."""
        pair = output, example.references[0]
        if self.subset != CLOZE:
            try:
                found = similarities(*pair, self.protocol)
            except RAISED:
                found = similarities(*pair, "kvpress")
            return found[metric(self.subset)], found
        kept = {name: count for name, count in cloze(*pair, self.protocol).items() if count is not None}
        counts = {**cloze(*pair, "kvpress"), **kept}  # kvpress's count if the authors have none
        sound = {f"{name}_sound": count for name, count in sound_cloze(*pair).items()}
        hits, blanks = kept["exact_match"]
        return hits / blanks, {**counts, **sound}


def _pairs(row: Row) -> Sequence[tuple[str, Any]]:
    """Questions and answers of a row, a list as Python code in a text; a row with a paper has only its summary."""
    pairs = row["qa_pairs"]
    if pairs == "none":
        return [("", row["output"])]
    listed = ast.literal_eval(pairs) if isinstance(pairs, str) else pairs
    return [(one["Q"], one["A"]) for one in listed]
