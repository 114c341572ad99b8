"""Which end of a prompt is its question: written out here for every task that has one."""

import json
from pathlib import Path
from typing import Any

import lm_eval_data
import pytest
import task_data
from char_tokenizer import CharTokenizer

from kvbench.tasks.lm_eval.task import LmEval
from kvbench.tasks.needlebench.task import NeedleBench
from kvbench.tasks.ruler.common_words import CommonWords
from kvbench.tasks.ruler.frequent_words import FrequentWords
from kvbench.tasks.ruler.niah import RulerNiah
from kvbench.tasks.ruler.question_answering import QuestionAnswering
from kvbench.tasks.ruler.recorded import RulerFile
from kvbench.tasks.ruler.variable_tracking import VariableTracking
from kvbench.tasks.task import Example, Task, Tokenizer, question_part


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return task_data.write(tmp_path_factory.mktemp("data"))


def first(task: Task, tokenizer: Any) -> Example:
    example = next(task.examples(tokenizer, 0))
    assert example.prompt.endswith(example.question)
    assert not example.question or not example.question[0].isspace()
    return example


@pytest.mark.parametrize(
    ("template", "question"),
    [
        ("{context}{question}", "{question}"),
        ("{context}\n\nNow answer.\n\nQuestion: {question}\nAnswer:", "Question: {question}\nAnswer:"),
        ("{context}\n\nSummarise it.", "Summarise it."),
        ("{question}\n{context}\nAnswer:", ""),
        ("Read this: {context}\n", ""),
    ],
)
def test_a_question_is_the_line_with_its_slot_or_all_that_follows_the_context(template: str, question: str) -> None:
    assert question_part(template, "{question}") == question


RULER: list[Task] = [
    RulerNiah(name="niah_single_1", length=600),
    RulerNiah(name="m", length=900, queries=4, keys=4),
    *(kind(length=900) for kind in (VariableTracking, CommonWords, FrequentWords)),
]


def test_rulers_documents_keep_the_instruction_that_all_questions_share(pieces: Tokenizer, data_dir: Path) -> None:
    example = first(QuestionAnswering(name="qa_1", dataset="squad", length=900, data_dir=str(data_dir)), pieces)
    assert example.question.startswith("Question: ")
    assert "\n" not in example.question
    assert example.prompt.removesuffix(example.question).endswith("do not output any other words.\n\n")


def test_a_recorded_prompt_of_ruler_has_the_question_it_was_made_with(pieces: Tokenizer, tmp_path: Path) -> None:
    for task in RULER:
        made = first(task, pieces)
        line = {"input": made.prompt, "outputs": list(made.references), "answer_prefix": made.answer_prefix}
        (tmp_path / "lines.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
        name = {"m": "niah_multiquery"}.get(task.name, task.name)
        assert first(RulerFile(task=name, path=str(tmp_path / "lines.jsonl")), pieces).question == made.question


@pytest.mark.parametrize("v2", [False, True])
def test_needlebenchs_document_ends_before_its_question(v2: bool, data_dir: Path) -> None:
    task = NeedleBench(v2=v2, counted_in="model", data_dir=str(data_dir), languages=("en",), cells=1, repeats=1)
    begins = "Based on the information in the document, now please answer: " if v2 else "Now, the question"
    examples = list(task.examples(CharTokenizer(), 0, 4))
    assert {example.metadata["task"] for example in examples} == {
        "single_retrieval",
        "multi_retrieval",
        "multi_reasoning",
    }
    for example in examples:
        assert example.prompt.endswith(example.question)
        assert example.question.startswith(begins)
        assert begins not in example.prompt.removesuffix(example.question)


def test_the_worked_examples_of_lm_eval_are_the_context_of_its_questions(pieces: Tokenizer, tmp_path: Path) -> None:
    for split, start in (("train", 0), ("test", 50)):
        lm_eval_data.write_jsonl(tmp_path / f"{split}.jsonl", lm_eval_data.gsm8k(9, start))
    (asked,) = lm_eval_data.gsm8k(1, 50)
    shown = first(LmEval(name="gsm8k", task="gsm8k", num_fewshot=2, data_dir=str(tmp_path)), pieces)
    assert shown.question == f"Question: {asked['question']}\nAnswer:"
    assert shown.prompt.count("Question: ") == 3
    alone = first(LmEval(name="gsm8k", task="gsm8k", num_fewshot=0, data_dir=str(tmp_path)), pieces)
    assert alone.question == ""
