"""The 12 tasks of InfiniteBench."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvbench.tasks.context_question import rows as columns
from kvbench.tasks.evidence import pair_spans
from kvbench.tasks.infinitebench.metrics import AUTHORS, KVPRESS, SOUND, first
from kvbench.tasks.long_sets import LongSet
from kvbench.tasks.predictions import judged
from kvbench.tasks.task import Example, question_part
from kvbench.tasks.text_files import Row

NUMBERS = ("code_run", "math_find", "math_calc")
CHOICES = ("code_debug", "longbook_choice_eng")
_CALL = re.compile(r"(func_[0-9]+)\(-?[0-9]+\)")
_WANTED = re.compile(r"(The .+) of")
_OPTIONS = re.compile(r"\nA\. (.*)\nB\. (.*)\nC\. (.*)\nD\. (.*)\Z")


@dataclass(frozen=True, kw_only=True)
class InfiniteBench(LongSet):
    """One task of InfiniteBench.

    chat: the authors use the plain prompt for open models. metadata has `answers` in the format of the scorer: numbers,
    or [option, letter]. If the official scorer raises an error, the score is 0. For broken official rules, the
    aggregates also have `score_sound`, the mean of a corrected rule.
    Source: OpenBMB/InfiniteBench at 88b3daa, src/prompt.py, src/eval_utils.py and src/eval_yarn_mistral.py.
    """

    benchmark = "infinitebench"
    file = "{subset}.jsonl"
    texts = ("context", "input")
    summed_by = "context_question"

    name: str = "infinitebench"

    def row_examples(self, row: Row) -> Iterator[Example]:
        """See `LongSet.row_examples`."""
        given, answers = self._given(row), self._answers(row["answer"], row.get("options") or [])
        slot = "{func_call}" if self.subset == "code_run" else "{A}" if self.subset == "code_debug" else "{input}"
        question = question_part(self.template, slot).format(**given)
        references = tuple(str(answer) for answer in answers)
        prompt = self.template.format(**given)
        yield self._with_evidence(self.example(prompt, question, references, answers=answers))

    def of_columns(self, row: columns.Row) -> Mapping[str, Any]:
        """The answers of a row, converted from texts to the format of the scorer."""
        answers: list[Any] = list(row.answers)
        if self.subset in NUMBERS:
            answers = [_number(answer) for answer in answers]
        if self.subset == "code_debug" and (options := _OPTIONS.search(row.values["question"])):
            answers = [options["ABCD".index(answers[0]) + 1], answers[0]]
        return {"answers": answers}

    def judge(self, output: str, example: Example) -> tuple[float, Mapping[str, Any]]:
        """The score by the protocol's rule, and a corrected score if that rule is broken."""
        answers = example.metadata["answers"]
        rules = AUTHORS if self.protocol == "authors" else KVPRESS
        wanted = first(answers) if self.subset == "kv_retrieval" else answers
        return judged(rules[self.subset], SOUND.get(self.subset), output, wanted)

    def column_example(self, row: columns.Row) -> Example:
        """See `LongSet.column_example`."""
        return self._with_evidence(super().column_example(row))

    def _with_evidence(self, example: Example) -> Example:
        if self.subset != "kv_retrieval":
            return example
        return replace(example, spans=pair_spans(example.references[0], example.prompt.removesuffix(example.question)))

    def _given(self, row: Row) -> dict[str, str]:
        given = {"context": row["context"], "input": row["input"]}
        if self.subset == "code_run":
            call = _found(_CALL, row["input"])
            return {**given, "func_call": call[0], "func": call[1]}
        if self.subset == "math_find":
            return {**given, "prefix": f"What is {_found(_WANTED, row['input'])[1].lower()} in the following list?"}
        return {**given, **dict(zip("ABCD", row["options"], strict=True))} if self.subset in CHOICES else given

    def _answers(self, answer: Any, options: Sequence[str]) -> list[Any]:  # noqa: ANN401 - as the rows have it
        answers = answer if isinstance(answer, list) else [answer]
        if self.subset in NUMBERS:
            nested = answers[0] if isinstance(answers[0], list) else answers
            return [_number(one) if isinstance(one, str) else one for one in nested]
        if self.subset in CHOICES and len(answers) == 1:
            return [answers[0], "ABCD"[list(options).index(answers[0])]]
        return answers


def _found(pattern: re.Pattern[str], text: str) -> re.Match[str]:
    found = pattern.search(text)
    if found is None:
        raise ValueError(f"input={text!r:.60} has no question in the expected format")
    return found


def _number(text: str) -> int | float:
    """A number: an integer if it is written as one."""
    return int(text) if re.fullmatch(r"-?\d+", text.strip()) else float(text)
