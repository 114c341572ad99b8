"""Problems with boxed answers as a task, and the presets of long answers, from invented rows."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvbench.config.compose import read
from kvbench.config.parts import build as built
from kvbench.tasks.task import Tokenizer


def build(name: str, **fields: object) -> Any:
    """The task of a preset."""
    return built({**read("task", name), **fields})


ROW = {"problem": "What is {3}/8?", "answer": r"\frac{3}{8}", "subject": "Algebra", "level": 2}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "test.jsonl").write_text(json.dumps(ROW) + "\n")
    return tmp_path


def test_math500_asks_for_a_box_and_both_rules_judge_what_stands_in_it(folder: Path, tokenizer: Tokenizer) -> None:
    task = build("math500", data_dir=str(folder))
    (example,) = task.examples(tokenizer, 0)
    asked = "What is {3}/8?\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert (example.prompt, example.references, example.max_new_tokens) == (asked, (r"\frac{3}{8}",), 32768)
    assert example.metadata["groups"] == ["subject", "level"]
    right = r"It is \boxed{\frac{3}{8}}."
    assert task.judge(right, example) == (1.0, {"sound": 1.0, "kvpress": 0.0, "answered": True})
    assert build("math500", data_dir=str(folder), protocol="kvpress").score(right, example) == 0.0


def test_text_before_the_end_of_thinking_is_not_scored(folder: Path, tokenizer: Tokenizer) -> None:
    task = build("math500", data_dir=str(folder))
    assert task.after_thinking("<think>no, \\boxed{1}</think>\n\nIt is 2.") == "It is 2."
    assert task.after_thinking("no thought, \\boxed{1}") == "no thought, \\boxed{1}"
    assert task.after_thinking("<think>cut off in a thought, \\boxed{1}") is None
    assert task.after_thinking("cut off in a thought, \\boxed{1}", opened=True) is None
    assert task.after_thinking("a</think>b", opened=True) == "b"
    assert build("math500", think_end=None).after_thinking("a</think>b") == "a</think>b"


@pytest.mark.parametrize(
    ("name", "rows", "right", "most"),
    [
        ("aime24", {"ID": "a", "Problem": "2 + 2?", "Solution": "", "Answer": "4"}, r"So \boxed{4}.", 32768),
        ("aime25", {"id": "a", "problem": "2 + 2?", "answer": "4"}, r"So \boxed{4}.", 32768),
        ("gsm8k", {"question": "2 + 2?", "answer": "It is 4.\n#### 4"}, "The answer is 4.", 16384),
    ],
)
def test_presets_through_lm_eval_score_what_stands_behind_the_thought(
    name: str, rows: dict[str, str], right: str, most: int, pieces: Tokenizer, tmp_path: Path
) -> None:
    split = {"aime24": "train"}.get(name, "test")
    (tmp_path / f"{split}.jsonl").write_text(json.dumps(rows) + "\n")
    task = build(name, data_dir=str(tmp_path), apply_chat_template=False)
    (example,) = task.examples(pieces, 0)
    assert ("boxed{}." in example.prompt, "2 + 2?" in example.prompt) == (name != "gsm8k", True)
    assert example.max_new_tokens == most
    assert task.task_of(example).stop == ()
    assert task.score(task.after_thinking(f"Question: is it 5? 5.</think>{right}"), example) == 1.0
    assert task.score(task.after_thinking(f"{right}</think>It is 17."), example) == 0.0
