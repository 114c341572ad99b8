"""Problems with boxed answers as a task, and the presets of long answers, from invented rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from task_data import build

from kvbench.tasks.task import Tokenizer

ROW = {"problem": "What is {3}/8?", "answer": r"\frac{3}{8}", "subject": "Algebra", "level": 2}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "test.jsonl").write_text(json.dumps(ROW) + "\n")
    return tmp_path


def test_math500_asks_for_a_box_and_both_rules_judge_what_stands_in_it(folder: Path, tokenizer: Tokenizer) -> None:
    task = build("math500", f"task.data_dir={folder}")
    (example,) = task.examples(tokenizer, 0)
    asked = "What is {3}/8?\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert (example.prompt, example.references, example.max_new_tokens) == (asked, (r"\frac{3}{8}",), 32768)
    assert example.metadata["groups"] == ["subject", "level"]
    right = r"It is \boxed{\frac{3}{8}}."
    assert task.judge(right, example) == (1.0, {"sound": 1.0, "kvpress": 0.0, "answered": True})
    assert build("math500", f"task.data_dir={folder}", "task.protocol=kvpress").score(right, example) == 0.0


def test_what_stands_before_the_end_of_thinking_is_not_scored(folder: Path, tokenizer: Tokenizer) -> None:
    task = build("math500", f"task.data_dir={folder}")
    assert task.after_thinking("<think>no, \\boxed{1}</think>\n\nIt is 2.") == "It is 2."
    assert task.after_thinking("cut off in a thought, \\boxed{1}") == "cut off in a thought, \\boxed{1}"
    assert build("math500", "task.think_end=null").after_thinking("a</think>b") == "a</think>b"


@pytest.mark.parametrize(
    ("field", "sentence"),
    [
        ("task.chat_template_args=3", "chat_template_args must be fields, such as {enable_thinking: false}, got 3"),
        ("task.think_end=''", "think_end must be a text, such as </think>, or null"),
        ("task.protocol=authors", "protocol must be sound or kvpress, got 'authors'"),
    ],
)
def test_a_wrong_field_is_one_sentence(field: str, sentence: str) -> None:
    with pytest.raises(Exception, match="instantiat") as raised:
        build("math500", field)
    assert sentence in str(raised.value.__cause__)
