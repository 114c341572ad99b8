"""What stands around lm-eval's tasks: finding them by name, reading local copies, SQuAD's scores."""

from pathlib import Path

import lm_eval_data as made
import pytest

from kvbench.tasks.lm_eval import find, squad
from kvbench.tasks.lm_eval.data import LocalCopy


@pytest.mark.parametrize(
    ("reference", "answer", "exact", "f1"),
    [
        ("The old miller", "an old Miller!", 1, 1.0),
        ("in spring", "in the late spring", 0, 2 * 2 / (2 + 3)),  # in, spring of in, late, spring
        ("barn barn", "barn", 0, 2 * 1 / (2 + 1)),
        ("", "", 1, 1.0),
        ("the", "", 1, 1.0),
        ("", "barn", 0, 0.0),
    ],
)
def test_squad_scores_by_hand(reference: str, answer: str, exact: int, f1: float) -> None:
    assert squad.compute_exact(reference, answer) == exact
    assert squad.compute_f1(reference, answer) == pytest.approx(f1)


@pytest.mark.slow("reads all tasks of lm-eval")
def test_every_name_of_lm_eval_is_known_without_its_index() -> None:
    from lm_eval.tasks import TaskManager

    known = TaskManager()
    names = {*find._files(), *find._tags()}
    assert {name for name in known.all_tasks if "::" not in name} <= names
    for name in ("gsm8k", "bbh", "mmlu", "longbench", "infinitebench", "longbench2", "humaneval"):
        assert known.task_index[name].yaml_path == find._files()[name]


def test_a_group_is_found_with_all_its_tasks() -> None:
    known = find.manager("bbh_fewshot")
    assert len(known.task_index["bbh_fewshot"].cfg["task"]) == 27
    assert set(known.task_index["bbh_fewshot"].cfg["task"]) <= set(known.task_index)
    assert find.asked_splits(known, "bbh_fewshot") == {"test"}


@pytest.mark.parametrize(
    ("path", "split"),
    [
        ("gsm8k_test.jsonl", "test"),
        ("main/test-00000-of-00001.parquet", "test"),
        ("gsm8k/main/test.parquet", "test"),
        ("GSM8K.jsonl", "test"),  # the only file is what is asked
        ("rows.jsonl.gz", "test"),
    ],
)
def test_a_split_is_found_in_the_layouts_of_the_hub_and_in_plain_ones(tmp_path: Path, path: str, split: str) -> None:
    rows = made.gsm8k(3)
    (made.write_parquet if path.endswith("parquet") else made.write_jsonl)(tmp_path / path, rows)
    found = LocalCopy(tmp_path, frozenset({"test"}))("openai/gsm8k", "main")
    assert list(found[split]) == rows
    assert len(found["train"]) == 0
    assert found["train"].column_names == ["question", "answer"]
    single = LocalCopy(tmp_path / path, frozenset({"test"}))("openai/gsm8k", "main")
    assert list(single[split]) == rows
