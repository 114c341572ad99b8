"""Invented rows in the formats in which the hub has the data sets of lm-eval's tasks, and the files that hold them."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

Rows = list[dict[str, Any]]


def gsm8k(count: int, start: int = 0) -> Rows:
    """openai/gsm8k, main: question, answer with its working and `#### number`."""
    people = ("Mia", "Ben", "Ada", "Tom", "Eva", "Leo", "Ida")
    rows = []
    for n in range(start, start + count):
        a, b = n + 3, 2 * n + 5
        name = people[n % len(people)]
        question = f"{name} has {a} pears and picks {b} more. How many pears does {name} have?"
        rows.append(
            {"question": question, "answer": f"{name} has {a} + {b} = <<{a}+{b}={a + b}>>{a + b} pears.\n#### {a + b}"}
        )
    return rows


def coqa(count: int) -> Rows:
    """EleutherAI/coqa: a story, the turns of a dialogue, and answers of further annotators by number."""
    rows = []
    for n in range(count):
        answers = [f"a red barn number {n}", "the old miller", "in spring"]
        turns = {"turn_id": [1, 2, 3], "input_text": ["What burnt?", "Who saw it?", "When was it?"]}
        given = {"turn_id": [1, 2, 3], "input_text": answers, "span_start": [0, 1, 2]}
        more = {str(i): {"turn_id": [1, 2, 3], "input_text": [*answers[:2], f"spring {i}"]} for i in range(2)}
        story = f"In spring a red barn number {n} burnt down by the river, and the old miller saw it from the bridge."
        rows.append(
            {"id": str(n), "source": "made", "story": story, "questions": turns, "answers": given}
            | {"additional_answers": more}
        )
    return rows


def truthfulqa(count: int) -> Rows:
    """truthfulqa/truthful_qa, generation."""
    return [
        {
            "type": "Adversarial",
            "category": "Misconceptions",
            "question": f"What happens if you whistle {n} times at night?",
            "best_answer": "Nothing in particular happens",
            "correct_answers": ["Nothing in particular happens", "You make a sound", "I have no comment"],
            "incorrect_answers": ["Snakes come into the house", f"You lose {n} coins"],
            "source": "made up",
        }
        for n in range(count)
    ]


def arc(count: int) -> Rows:
    """allenai/ai2_arc, ARC-Easy: four choices with letters."""
    return [
        {
            "id": f"made_{n}",
            "question": f"Which of these is heaviest, if a stone weighs {n + 2} kilograms?",
            "choices": {
                "text": ["a feather", "the stone", "a dry leaf", "a drop of rain"],
                "label": ["A", "B", "C", "D"],
            },
            "answerKey": "ABCD"[n % 4],
        }
        for n in range(count)
    ]


def winogrande(count: int) -> Rows:
    """allenai/winogrande: the choices stand in the context, what follows them is rated."""
    sentence = "The trunk did not fit into the car number {} because _ was too small."
    return [
        {"sentence": sentence.format(n), "option1": "the trunk", "option2": "the car", "answer": str(n % 2 + 1)}
        for n in range(count)
    ]


def lambada(count: int) -> Rows:
    """EleutherAI/lambada_openai: the last word is rated."""
    return [
        {"text": f"After {n} days on the river they were glad to see the mill and its miller"} for n in range(count)
    ]


def humaneval(count: int = 2) -> Rows:
    """openai/openai_humaneval: the head of a function, and a `check` that calls it."""
    return [
        {
            "task_id": f"Made/{n}",
            "prompt": f'def add_{n}(a, b):\n    """Return a + b + {n}.\n    >>> add_{n}(1, 2)\n    {n + 3}\n    """\n',
            "canonical_solution": f"    return a + b + {n}\n",
            "test": "\n\nMETADATA = {}\n\n\ndef check(candidate):\n"
            f"    assert candidate(1, 2) == {n + 3}\n    assert candidate(0, 0) == {n}\n",
            "entry_point": f"add_{n}",
        }
        for n in range(count)
    ]


def write_jsonl(path: Path, rows: Rows) -> Path:
    """A file with a row a line; `.gz` is compressed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def write_parquet(path: Path, rows: Rows) -> Path:
    """A file as the hub converts data sets."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


def write_all(folder: Path) -> dict[str, Path]:
    """A data_dir for each task, in the layouts of the hub and in plain ones."""
    write_parquet(folder / "gsm8k/main/train-00000-of-00001.parquet", gsm8k(12, start=100))
    write_parquet(folder / "gsm8k/main/test-00000-of-00001.parquet", gsm8k(4))
    write_jsonl(folder / "coqa/coqa_validation.jsonl", coqa(3))
    write_parquet(folder / "truthful_qa/generation/validation-00000-of-00001.parquet", truthfulqa(3))
    write_jsonl(folder / "arc/ARC-Easy/test.jsonl", arc(4))
    write_jsonl(folder / "winogrande/validation.jsonl", winogrande(3))
    write_jsonl(folder / "lambada/lambada_test.jsonl", lambada(3))
    write_jsonl(folder / "humaneval/HumanEval.jsonl.gz", humaneval())
    return {
        "gsm8k": folder / "gsm8k",
        "gsm8k_cot": folder / "gsm8k",
        "gsm8k_cot_zeroshot": folder / "gsm8k",
        "coqa": folder / "coqa",
        "truthfulqa_gen": folder / "truthful_qa",
        "arc_easy": folder / "arc",
        "winogrande": folder / "winogrande",
        "lambada_openai": folder / "lambada",
        "humaneval": folder / "humaneval/HumanEval.jsonl.gz",
    }
