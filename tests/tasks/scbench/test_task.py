"""SCBench as a task: its texts in both modes, its turns, limits and scores, from invented rows in its form."""

from pathlib import Path
from typing import Any

import pytest
from shared_context_files import ROWS, write
from task_data import build

from kvbench.tasks.scbench.summary import summary
from kvbench.tasks.task import Example, Task, Tokenizer


def asked(tokenizer: Tokenizer, name: str, folder: Path, *overrides: str) -> tuple[Task, list[Example]]:
    task = build(f"scbench/{name}", f"task.data_dir={folder}", *overrides)
    return task, list(task.examples(tokenizer, 0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("scbench"))


@pytest.mark.parametrize("mode", ["multi_turn", "scdq"])
@pytest.mark.parametrize("name", ROWS)
def test_every_turn_is_an_example_whose_right_answer_scores_1(
    name: str, mode: str, pieces: Tokenizer, folder: Path
) -> None:
    task, examples = asked(pieces, name, folder, f"task.mode={mode}")
    rows = ROWS[name]["multi_turns"]
    assert task.name == f"scbench_{name}"
    assert task.compress == ("context" if mode == "scdq" else "prompt")
    assert [example.metadata["turn"] for example in examples] == [number + 1 for number in range(len(rows))]
    for example in examples:
        right = " ".join(example.references) if name != "choice_eng" else example.references[1]
        assert task.score(right, example) == pytest.approx(1.0)
        assert task.score("\u00a7\u00a7\u00a7", example) == 0.0
        assert example.prompt.endswith(example.question)


def test_a_conversation_asks_behind_the_golden_answers_and_alone_behind_the_context(
    pieces: Tokenizer, folder: Path
) -> None:
    _, turns = asked(pieces, "qa_eng", folder)
    book = "Read the book and answer the question. Be very concise in your answer.\n\nAda is old."
    assert [turn.prompt for turn in turns] == [f"{book}\n\nQuestion: Who is old?\nAnswer:"] * 2
    (follow_up,) = turns[1].shared.follow_ups or ()
    assert follow_up.plain == "Ada\n\nQuestion: Is she?\nAnswer:"
    assert (follow_up.answer, follow_up.message) == ("Ada", "Question: Is she?\nAnswer:")
    assert [turn.shared and turn.shared.turn for turn in turns] == [0, 1]
    _, alone = asked(pieces, "qa_eng", folder, "task.mode=scdq")
    assert alone[1].prompt == f"{book}Question: Is she?\nAnswer:"  # no blank line between
    _, own = asked(pieces, "qa_eng", folder, "task.history=own")
    assert [turn.plain for turn in own[1].shared.follow_ups or ()] == ["Question: Is she?\nAnswer:"]


def test_a_list_task_repeats_its_instruction_before_each_question(pieces: Tokenizer, folder: Path) -> None:
    _, turns = asked(pieces, "mf", folder)
    assert turns[0].prompt == "What is the largest number?\n\n[42, 7]\n\nThe largest number is"
    (later,) = turns[0].shared.follow_ups or ()
    assert later.plain == "42\n\nWhat is the smallest number?\n\nThe smallest number is"
    _, alone = asked(pieces, "mf", folder, "task.mode=scdq")
    assert alone[1].prompt == ("The largest number is\n\n[42, 7]What is the smallest number?\n\nThe smallest number is")


def test_limits_and_beginnings_are_the_authors(pieces: Tokenizer, folder: Path) -> None:
    _, mixed = asked(pieces, "repoqa_and_kv", folder)
    assert [turn.max_new_tokens for turn in mixed] == [1024, 80, 1024]
    assert mixed[0].shared.spare == (1024 + 80) * 3 // 2
    _, summaries = asked(pieces, "summary", folder)
    assert [turn.begins for turn in summaries[1].shared.follow_ups or ()] == ["This paper"]
    assert summaries[1].answer_prefix == ""
    _, choices = asked(pieces, "choice_eng", folder)
    assert choices[0].prompt.endswith("\nD. four\n\nThe the correct answer is")
    (later,) = choices[0].shared.follow_ups or ()
    assert later.plain.endswith("\nD. four\n\nThe letter of the correct answer is")
    assert later.message.endswith("The the correct answer is")


def answered(task: Task, example: Example, output: str) -> Any:
    class Given:
        references, metadata = example.references, example.metadata
        score, measures = task.judge(output, example)

    Given.output = output
    return Given


def test_the_aggregates_are_the_official_ones_of_each_turn(pieces: Tokenizer, folder: Path) -> None:
    task, turns = asked(pieces, "many_shot", folder)
    answers = [answered(task, turn, "(A)") for turn in turns]
    assert summary(answers) == {"turn 1": 100.0, "turn 2": 100.0, "score_sound": 50.0}
    task, turns = asked(pieces, "repoqa_and_kv", folder, "task.mode=scdq")
    answers = [answered(task, turn, turn.references[0]) for turn in turns]
    assert summary(answers) == {"all turns, scbench_repoqa": 100.0, "all turns, scbench_kv": 0.0}  # as printed there
