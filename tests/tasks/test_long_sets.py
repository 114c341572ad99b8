"""The public long sets as tasks: prompts, limits and scores of both protocols, from invented rows in their forms."""

from pathlib import Path
from typing import Any

import datasets
import pytest
from long_set_files import INFINITEBENCH, LOOGLE, write_authors, write_kvpress
from task_data import build

from kvbench.tasks.task import Example, Task, Tokenizer

ANSWERED = ["longbench_v2", *(f"infinitebench/{name}" for name in INFINITEBENCH), *(f"loogle/{one}" for one in LOOGLE)]
SAYS = {"longbench_v2": "The correct answer is (C)", "infinitebench/code_debug": "C.", "infinitebench/math_find": "42"}


def asked(tokenizer: Tokenizer, name: str, folder: Path, *overrides: str) -> tuple[Task, Example]:
    task = build(name, f"task.data_dir={folder}", *overrides)
    return task, next(task.examples(tokenizer, 0))


@pytest.fixture(scope="module")
def authors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_authors(tmp_path_factory.mktemp("authors"))


@pytest.mark.parametrize("name", ANSWERED)
def test_the_right_answer_scores_1_and_the_question_ends_the_prompt(
    name: str, pieces: Tokenizer, authors: Path
) -> None:
    task, example = asked(pieces, name, authors)
    right = SAYS.get(name, " ".join(example.references))
    assert task.name == name.replace("/", "_")
    assert task.score(right, example) == pytest.approx(1.0)
    assert task.score("\u00a7\u00a7\u00a7", example) == 0.0
    assert example.prompt.endswith(example.question)
    assert example.question
    assert (task.chat, task.truncation) == (name == "longbench_v2", "middle")


@pytest.mark.parametrize(
    ("name", "prompt", "question", "tokens"),
    [
        (
            "infinitebench/math_find",
            "What is the second largest number in the following list?\n\n[42, 7]\n\n"
            "The second largest number of the list is:",
            "The second largest number of the list is:",
            3,
        ),
        (
            "infinitebench/code_run",
            "There is a function called func_1 in the following Python code.\n\ndef func_1(x): return -37\n\n"
            "Please compute the exact value of func_1(-4). The value of func_1(-4) is",
            "Please compute the exact value of func_1(-4). The value of func_1(-4) is",
            5,
        ),
        (
            "loogle/shortdep_qa",
            "Please answer the question based on the long texts below. \nAda is old.\nQuestion: Who?\nAnswer: ",
            "Question: Who?\nAnswer: ",
            300,
        ),
    ],
)
def test_a_prompt_is_the_authors(
    name: str, prompt: str, question: str, tokens: int, pieces: Tokenizer, authors: Path
) -> None:
    _, example = asked(pieces, name, authors)
    assert (example.prompt, example.question, example.max_new_tokens) == (prompt, question, tokens)


@pytest.mark.parametrize(
    ("name", "configuration", "columns", "output"),
    [
        ("longbench_v2", "0shot", {"answer": "C"}, "The correct answer is (A). No: The correct answer is (C)"),
        ("infinitebench/math_calc", "math_calc", {"answer": ["1", "-4"]}, "1"),
        ("infinitebench/longbook_choice_eng", "longbook_choice_eng", {"answer": ["C"]}, "Answer: C"),
        ("infinitebench/longdialogue_qa_eng", "longdialogue_qa_eng", {"answer": ["ACE", "BEA"]}, "Bea"),
        ("loogle/shortdep_cloze", "shortdep_cloze", {"answer": '{"<mask-0>": "Ada"}'}, "{'<mask-0>': 'Ada'}"),
    ],
)
def test_kvpress_s_columns_are_its_prompt_and_its_rules_the_score(
    name: str, configuration: str, columns: dict[str, Any], output: str, pieces: Tokenizer, tmp_path: Path
) -> None:
    folder = write_kvpress(tmp_path, configuration, **columns)
    task, example = asked(pieces, name, folder, "task.protocol=kvpress")
    assert (example.prompt, example.answer_prefix) == ("Read: the mill.\n\nWhich?\n", "It is")
    assert (example.question, example.max_new_tokens, task.chat) == ("Which?\n", 26, True)
    assert task.score(output, example) == (0.5 if name.endswith("math_calc") else 1.0)


def test_an_answer_on_which_the_official_scorer_raises_counts_0_beside_the_sound_score(
    pieces: Tokenizer, authors: Path
) -> None:
    task, example = asked(pieces, "infinitebench/math_find", authors)
    assert task.judge("42.0", example) == (0.0, {"score": 0.0, "score_sound": 1.0})
    task, example = asked(pieces, "loogle/shortdep_qa", authors)
    assert task.score("...", example) == 0.0


@pytest.mark.parametrize("name", ["gov_report", "qasper", "quality"])
def test_zero_scrolls_are_read_from_files_and_archives(name: str, pieces: Tokenizer, authors: Path) -> None:
    task, example = asked(pieces, f"zero_scrolls/{name}", authors)
    assert task.name == f"zero_scrolls_{name}"
    assert example.prompt.startswith("Read.\n\nStory:\nIt rained.")
    assert example.prompt.endswith(example.question)
    assert "It rained" not in example.question


def test_kvpress_s_rows_come_from_its_data_set_at_the_revision_named(
    pieces: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_for: list[Any] = []

    def load(*names: str | None, **given: str | None) -> None:
        asked_for.append((names, given))
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", load)
    task = build("longbench_v2", "task.protocol=kvpress")
    with pytest.raises(ValueError, match=r"^kvpress_hub=simonjegou/LongBench-v2 cannot be read .* give data_dir="):
        next(task.examples(pieces, 0))
    revision = "5f14e86aebef1ba64a519eb6864e52b1985b9c94"
    assert asked_for == [(("simonjegou/LongBench-v2", "0shot"), {"split": "test", "revision": revision})]
