"""RULER's tasks that read data, needles in essays and question answering, on invented files in the official formats."""

import re
from dataclasses import replace

import pytest
import ruler_files
from task_data import Answer

from kvbench.tasks.ruler.niah import RulerNiah
from kvbench.tasks.ruler.question_answering import QuestionAnswering
from kvbench.tasks.scores import summary
from kvbench.tasks.task import Example, Tokenizer

ESSAY = RulerNiah(name="niah_single_2", haystack="essay", length=3000)
SQUAD = QuestionAnswering(name="qa_1", length=3000)
HOTPOT = QuestionAnswering(name="qa_2", dataset="hotpotqa", length=3000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(ruler_files.write(tmp_path_factory.mktemp("ruler")))


def used(example: Example, tokenizer: Tokenizer) -> int:
    return len(tokenizer.encode(example.prompt + example.answer_prefix)) + example.max_new_tokens


# --- essays ---


def test_needles_are_between_sentences_and_occur_once(folder: str, pieces: Tokenizer) -> None:
    for fields in ({}, {"keys": 4}, {"values": 4}, {"queries": 4}, {"value": "uuids"}):
        task = replace(ESSAY, data_dir=folder, **fields)
        for example in task.examples(pieces, 5, 4):
            assert 1500 < used(example, pieces) <= 3000
            kind = "uuid" if fields.get("value") else "number"
            told = re.findall(rf"One of the special magic {kind}s for \S+ is: (\S+)\.(?= |\n)", example.prompt)
            assert len(told) == max([1, *(n for n in fields.values() if isinstance(n, int))])
            assert set(example.references) <= set(told)
            for value in told:
                before = example.prompt.split(f"is: {value}.")[0].rsplit("One of", 1)[0].rstrip()
                assert before.endswith((".", "?", "!", "afterwards."))


# --- questions ---


@pytest.mark.parametrize("task", [SQUAD, HOTPOT], ids=["squad", "hotpotqa"])
def test_prompts_hold_the_gold_documents_once_and_fill_the_length(
    task: QuestionAnswering, folder: str, pieces: Tokenizer
) -> None:
    for example in replace(task, data_dir=folder).examples(pieces, 3, 6):
        tokens = used(example, pieces)
        assert example.metadata["used"] == tokens
        assert 1500 < tokens <= 3000
        numbers = [int(number) for number in re.findall(r"^Document (\d+):$", example.prompt, re.MULTILINE)]
        assert numbers == list(range(1, len(numbers) + 1))
        documents = re.split(r"\n\n(?:Document \d+:\n|Answer the question)", example.prompt)[1:-1]
        assert len(set(documents)) == len(documents) == len(numbers)
        gold = [document for document in documents if re.search(rf"{example.references[0]}\b", document)]
        assert len(gold) == (1 if task is SQUAD else 10)


# --- the official table ---


def test_the_table_averages_rounded_percents_of_tasks() -> None:
    scores = {"vt": [1.0, 1.0, 0.0], "qa_1": [1.0]}
    run = [Answer(s, {"benchmark": "ruler", "task": name}) for name, each in scores.items() for s in each]
    assert summary(run) == {"task=vt": 66.67, "task=qa_1": 100.0, "average": pytest.approx((66.67 + 100) / 2, abs=1e-9)}
    assert summary(run[:3]) == {"task=vt": 66.67}
