"""Questions from files with a column for each: what a row becomes, how answers are scored, what is refused."""

import json
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pytest

from kvbench.tasks.context_question.metrics import METRICS
from kvbench.tasks.context_question.task import ContextQuestion
from kvbench.tasks.task import Example, Tokenizer

ROW: dict[str, Any] = {
    "context": "Read this. {The} mill is red.\n\n",
    "question": "\nQuestion: What is red?\n",
    "answer_prefix": "Answer: ",
    "answer": ["the mill", "it"],
    "task": "shortdep_qa",
    "max_new_tokens": 20,
}


def asked(tokenizer: Tokenizer, limit: int | None = None, **fields: Any) -> list[Example]:
    return list(ContextQuestion(**fields).examples(tokenizer, 0, limit))


def jsonl(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_a_row_becomes_a_prompt_whose_end_is_the_question(pieces: Tokenizer, tmp_path: Path) -> None:
    jsonl(tmp_path / "rows.jsonl", ROW)
    pd.DataFrame([{**ROW, "answer": json.dumps(ROW["answer"])}]).to_csv(tmp_path / "rows.csv", index=False)
    for example in asked(pieces, data_dir=str(tmp_path)):
        assert example.prompt == "Read this. {The} mill is red.\n\n\nQuestion: What is red?\n"
        assert (example.question, example.answer_prefix) == ("\nQuestion: What is red?\n", "Answer: ")
        assert (example.references, example.max_new_tokens) == (("the mill", "it"), 20)
        assert example.metadata["task"] == "shortdep_qa"


def test_a_folder_is_read_file_by_file_and_fields_stand_before_columns(pieces: Tokenizer, tmp_path: Path) -> None:
    plain = {key: ROW[key] for key in ("context", "question")}
    jsonl(tmp_path / "b.jsonl", {**plain, "answers": "[1] is it"})
    jsonl(tmp_path / "a.jsonl", {**ROW, "question": "Who?"}, {**ROW, "answers": ["first of both"]})
    found = asked(pieces, data_dir=str(tmp_path), max_new_tokens=7, frame="{context}Q: {question}\nA:", name="mine")
    assert [example.references[0] for example in found] == ["the mill", "first of both", "[1] is it"]
    assert {example.max_new_tokens for example in found} == {7}
    assert found[0].question == "Q: Who?\nA:"
    assert found[2].metadata["task"] == "mine"
    assert len(asked(pieces, 2, data_dir=str(tmp_path), max_new_tokens=7)) == 2


def test_a_data_set_of_the_hub_is_read_by_name_subset_and_split(
    pieces: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []

    def load(*given: object, **named: object) -> Any:
        called.append((given, named))
        return datasets.Dataset.from_list([ROW, {**ROW, "question": "Who?"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    found = asked(pieces, hub="a/b", subset="c", revision="d0")
    assert called == [(("a/b", "c"), {"split": "test", "revision": "d0"})]
    assert [example.question for example in found] == [ROW["question"], "Who?"]

    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("no\nnetwork")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(ValueError, match=r"hub=a/b cannot be read \(ConnectionError: no network\): check hub, subset"):
        asked(pieces, hub="a/b")


AS_TEXT: list[tuple[str, str, tuple[str, ...] | str]] = [
    ("answers", "['3965550']", ("3965550",)),
    ("answers", '["3965550"]', ("3965550",)),
    ("answers", "['it\\'s', \"a 'b'\"]", ("it's", "a 'b'")),
    ("answers", "('a', 'b')", ("a", "b")),
    ("answers", "[3965550]", ("3965550",)),
    ("answer", "[1, 2]", ("[1, 2]",)),
    ("answer", "['a', 'b']", ("a", "b")),
    ("answers", "[unclosed", ("[unclosed",)),
    ("answers", "plain", ("plain",)),
    ("answers", "['a' 'b']", "a list without commas"),
    ("answers", "['a'\n 'b']", "a list without commas"),
    ("answers", "['']", "'' is an empty text"),
    ("answers", '["a", " "]', r"' ' in \['a', ' '\] is an empty text"),
    ("answers", " ", "' ' is an empty text"),
    ("answers", "\u200b", "is an empty text"),
]


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize(("column", "text", "expected"), AS_TEXT)
def test_lists_written_as_text_are_lists_and_empty_answers_are_refused(
    pieces: Tokenizer, tmp_path: Path, suffix: str, column: str, text: str, expected: tuple[str, ...] | str
) -> None:
    row = pd.DataFrame([{"context": "Read.", "question": "What?", column: text, "max_new_tokens": 4}])
    path = tmp_path / f"rows.{suffix}"
    {
        "csv": lambda: row.to_csv(path, index=False),
        "jsonl": lambda: row.to_json(path, orient="records", lines=True),
        "parquet": lambda: row.to_parquet(path),
    }[suffix]()
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=rf"(?s)rows.{suffix}, row 1: {column}.* .*{expected}"):
            asked(pieces, data_dir=str(path))
    else:
        assert asked(pieces, data_dir=str(path))[0].references == expected


def test_whole_numbers_that_pandas_wrote_as_floats_are_whole_again(
    pieces: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = {"context": "Read.", "question": "What?"}
    rows = [
        {**plain, "answer": 3965553, "max_new_tokens": 4},
        {**plain, "answers": '["a", "b"]', "max_new_tokens": 5},
        {**plain, "answer": -12, "max_new_tokens": 6},
    ]
    path = tmp_path / "rows.csv"
    pd.DataFrame(rows).to_csv(path, index=False)
    assert "3965553.0" in path.read_text()
    found = asked(pieces, data_dir=str(path))
    assert [example.references for example in found] == [("3965553",), ("a", "b"), ("-12",)]
    assert [example.max_new_tokens for example in found] == [4, 5, 6]
    assert not caplog.records

    rows = [{**plain, "answer": value, "max_new_tokens": 4} for value in ("Rome", 3.0, 1.5, 2.0)]
    pd.DataFrame(rows).to_csv(path, index=False)
    assert [example.references for example in asked(pieces, data_dir=str(path))] == [
        ("Rome",),
        ("3.0",),
        ("1.5",),
        ("2.0",),
    ]
    (warning,) = caplog.messages
    assert warning.startswith("rows.csv, row 2: the answer 3.0 looks like a whole number that was written as a float")


def test_both_unicode_forms_of_a_letter_are_equal(pieces: Tokenizer, tmp_path: Path) -> None:
    one, two = "caf\u00e9", "cafe\u0301"
    for metric in ("contains", "contains_any", "exact_match", "needle_words", "qa_f1", "rouge_l", "rouge1_recall"):
        task = ContextQuestion(data_dir="-", metrics=(metric,))
        for output, reference in ((one, two), (two, one), (one, one), (two, two)):
            assert task.score(output, Example(0, "", (reference,), 4)) == pytest.approx(1)
        assert task.score("tea", Example(0, "", (two,), 4)) == 0
    assert ContextQuestion(data_dir="-").score(two, Example(0, "", ("cafe",), 4)) == 0  # another word


@pytest.mark.parametrize(
    ("metric", "answer", "needs"),
    [
        ("first_number", "two", "a number without a sign, such as 42"),
        ("first_number", "-3", "a number without a sign, such as 42"),
        ("last_letter", "b", "a letter from A to J"),
        ("correct_choice", "the mill", "a letter from A to D"),
    ],
)
def test_answers_that_no_output_can_match_are_refused(
    pieces: Tokenizer, tmp_path: Path, metric: str, answer: str, needs: str
) -> None:
    path = jsonl(tmp_path / "rows.jsonl", {**ROW, "answer": answer})
    with pytest.raises(ValueError, match=f"rows.jsonl, row 1: metric {metric} needs an answer that is {needs}, got "):
        asked(pieces, data_dir=path, metrics=(metric, "contains_any"))
    assert len(asked(pieces, data_dir=path, metrics=("contains_any", metric))) == 1


# Worked by hand: an output, the references, and what each metric says.
SCORED: list[tuple[str, str, tuple[str, ...], float]] = [
    ("exact_match", " Red\n", ("red", "green"), 1.0),
    ("exact_match", "red mill", ("red",), 0.0),
    ("correct_choice", "So: **The correct answer is (B)**, not (A).", ("B",), 1.0),
    ("correct_choice", "(B)", ("B",), 0.0),
    ("last_letter", "A or B? I say B.", ("B",), 1.0),
    ("last_letter", "Both", ("B",), 0.0),
    ("last_letter", "The answer is B. I hope it helps.", ("B",), 1.0),
    ("last_letter", "B. A good choice, I'm sure.", ("B",), 1.0),
    ("last_letter", "I is right, as A is too short", ("A",), 1.0),
    ("last_letter", "The answer is I because of the date", ("I",), 1.0),
    ("last_letter", "The answer is (B), and C is wrong.", ("B",), 1.0),
    ("last_letter", "It must be C, not A", ("C",), 1.0),
    ("last_letter", "所以选B。A和C都不对", ("B",), 1.0),
    ("last_letter", "应该是选项C吧", ("C",), 1.0),
    ("last_letter", "Vitamin-D3, A-level, ÄB", ("B",), 0.0),
    ("first_number", "The key is 0042, not 7.", ("42",), 1.0),
    ("first_number", "It is 3.50 of 7", ("3.5",), 1.0),
    ("qa_f1", "the red mill", ("a red barn", "blue"), 0.5),  # one of two words each way
    ("rouge_l", "the mill is red", ("the mill is red",), 1.0),
    ("code_sim", "return a", ("return a",), 1.0),
]


@pytest.mark.parametrize(("metric", "output", "references", "score"), SCORED)
def test_metrics_equal_a_hand_calculation(metric: str, output: str, references: tuple[str, ...], score: float) -> None:
    assert METRICS[metric](output, references) == pytest.approx(score, abs=1e-6)
