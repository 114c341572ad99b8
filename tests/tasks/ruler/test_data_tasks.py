"""RULER's tasks that read data, needles in essays and question answering, on invented files in the official formats."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import ruler_files

from kvbench.tasks.ruler.essays import essay_words, punkt_sentences, rule_sentences
from kvbench.tasks.ruler.niah import DEPTHS, RulerNiah
from kvbench.tasks.ruler.question_answering import QuestionAnswering
from kvbench.tasks.suite import RulerSuite
from kvbench.tasks.summary import summary
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


def test_needles_stand_between_sentences_and_are_told_once(folder: str, pieces: Tokenizer) -> None:
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


def test_essays_are_taken_from_the_start_and_repeated_when_too_short(folder: str) -> None:
    words = essay_words(folder, 10**4)
    assert words[:5] == ["Essay", "a", "goes", "on", "with"]
    once = 60 * 21  # words of one essay
    assert words[: 2 * once] == words[2 * once : 4 * once]


def test_rulers_own_file_goes_before_text_files(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("not read", encoding="utf-8")
    (tmp_path / "PaulGrahamEssays.json").write_text(json.dumps({"text": "One  two.\n\nThree"}), encoding="utf-8")
    assert essay_words(str(tmp_path), 4) == ["One", "two.", "Three", "One"]


def test_the_rule_cuts_after_closing_marks() -> None:
    assert rule_sentences('He said "no." Then he left! Why?') == ['He said "no."', "Then he left!", "Why?"]


def test_depths_are_the_40_rounded_percents() -> None:
    assert (len(DEPTHS), DEPTHS[0], DEPTHS[1], DEPTHS[19], DEPTHS[-1]) == (40, 0, 3, 49, 100)


def test_official_essays_ask_for_nltks_data(monkeypatch: pytest.MonkeyPatch) -> None:
    import nltk

    monkeypatch.setattr(nltk.data, "path", [])
    with pytest.raises(ValueError, match=r"punkt_tab, which is not installed: python -m nltk\.downloader punkt_tab"):
        punkt_sentences("One. Two.")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "is damaged or of another form"),
        ('{"txt": "a"}', "is damaged or of another form"),
        ('{"text": " "}', "no text"),
    ],
)
def test_damaged_essays_are_refused(tmp_path: Path, content: str, sentence: str) -> None:
    (tmp_path / "PaulGrahamEssays.json").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=sentence):
        essay_words(str(tmp_path), 1)


def test_without_essays_one_sentence_says_what_to_give(tmp_path: Path, words: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"data_dir=null is not allowed for essays: give a folder with \.txt files"):
        next(ESSAY.examples(words, 0))
    with pytest.raises(ValueError, match="holds no text"):
        next(replace(ESSAY, data_dir=str(tmp_path)).examples(words, 0))


def test_more_needles_than_depths_are_refused() -> None:
    with pytest.raises(ValueError, match="keys=41, values=1, queries=1 make more needles than the 40 depths"):
        replace(ESSAY, keys=41)


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


def test_squad_asks_answerable_questions_in_file_order_with_all_answers(folder: str, words: Tokenizer) -> None:
    found = list(replace(SQUAD, data_dir=folder, length=1500).examples(words, 0, 7))
    expected = [(f"Num{i // 5}x{i % 5}", f"village of Num{i // 5}x{i % 5}") for i in range(7)]
    assert [example.references for example in found] == expected
    assert all("Why?" not in example.prompt for example in found)


def test_paragraphs_of_the_same_article_come_before_others(folder: str, words: Tokenizer) -> None:
    example = next(replace(SQUAD, data_dir=folder, length=1500).examples(words, 0))
    assert all(f"Article 0 paragraph {p} " in example.prompt for p in range(5))


def test_any_answer_counts_in_full(folder: str, words: Tokenizer) -> None:
    task = replace(SQUAD, data_dir=folder)
    example = next(task.examples(words, 0))
    assert task.score(" It is num0x0.", example) == 1.0
    assert task.score("Num0\tx0", example) == 0.0


def test_questions_do_not_depend_on_the_limit(folder: str, words: Tokenizer) -> None:
    task = replace(HOTPOT, data_dir=folder, samples=5)
    everything = list(task.examples(words, 9))
    assert [list(task.examples(words, 9, limit)) for limit in (0, 2)] == [everything[:0], everything[:2]]


def test_more_samples_than_questions_are_refused_where_they_end(folder: str, words: Tokenizer) -> None:
    examples = replace(HOTPOT, data_dir=folder).examples(words, 0)
    with pytest.raises(ValueError, match="samples=500 is more than the 40 questions of hotpotqa"):
        list(examples)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("[", r"dev-v2\.0\.json is damaged or of another form \(JSONDecodeError"),
        ("{}", r"is damaged or of another form \(KeyError: 'data'\)"),
        ('{"data": []}', "has no questions"),
    ],
)
def test_a_damaged_question_file_is_refused(tmp_path: Path, content: str, sentence: str, words: Tokenizer) -> None:
    (tmp_path / "dev-v2.0.json").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=sentence):
        next(replace(SQUAD, data_dir=str(tmp_path)).examples(words, 0))


def test_without_questions_one_sentence_says_what_to_download(tmp_path: Path, words: Tokenizer) -> None:
    with pytest.raises(
        ValueError, match=r"data_dir=null is not allowed for qa_1: download https://rajpurkar.*dev-v2\.0"
    ):
        next(SQUAD.examples(words, 0))
    with pytest.raises(ValueError, match=r"has no hotpot_dev_distractor_v1\.json: download https://huggingface"):
        next(replace(HOTPOT, data_dir=str(tmp_path)).examples(words, 0))


def test_a_length_that_no_documents_fit_is_refused(folder: str, words: Tokenizer) -> None:
    with pytest.raises(ValueError, match="length=200 is too small for qa_1"):
        next(replace(SQUAD, data_dir=folder, length=200).examples(words, 0))


def test_one_folder_serves_a_whole_suite(folder: str, words: Tokenizer) -> None:
    suite = RulerSuite(name="ruler", length=2000, data_dir=folder, tasks={"niah_single_2": ESSAY, "qa_1": SQUAD})
    assert [example.metadata["task"] for example in suite.examples(words, 0, 2)] == ["niah_single_2", "qa_1"]


# --- the official table ---


@dataclass(frozen=True)
class Answer:
    """What a run keeps of an example."""

    score: float | None
    metadata: dict[str, Any] = field(default_factory=dict)
    references: tuple[str, ...] = ()
    output: str | None = ""


def test_the_table_averages_rounded_percents_of_tasks() -> None:
    scores = {"vt": [1.0, 1.0, 0.0], "qa_1": [1.0]}
    run = [Answer(s, {"benchmark": "ruler", "task": name}) for name, each in scores.items() for s in each]
    assert summary(run) == {"task=vt": 66.67, "task=qa_1": 100.0, "average": pytest.approx((66.67 + 100) / 2, abs=1e-9)}
    assert summary(run[:3]) == {"task=vt": 66.67}


def test_200_samples_have_the_parameters_of_the_task(folder: str, words: Tokenizer) -> None:
    task = replace(ESSAY, data_dir=folder, length=1300)
    keys, depths = set(), []
    for example in task.examples(words, 42, 200):
        (value,) = example.references
        assert example.prompt.count(value) == 1
        assert len(value) == 7
        keys.add(example.answer_prefix)
        context = example.prompt.split("afterwards.\n")[1].split("\nWhat is")[0]
        depths.append(context.index("One of the special") / len(context))
    assert len(keys) == 200
    # Uniform over 40 depths from 0 to 1: the mean of 200 has a standard error of 0.02, the deviation is 0.3.
    assert abs(sum(depths) / 200 - 0.5) < 0.07
    assert 0.25 < (sum((depth - 0.5) ** 2 for depth in depths) / 200) ** 0.5 < 0.34
    assert min(depths) < 0.05
    assert max(depths) > 0.9
