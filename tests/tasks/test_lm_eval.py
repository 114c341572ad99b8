"""What stands around lm-eval's tasks: finding them by name, reading local copies, SQuAD's scores."""

from pathlib import Path

import datasets
import lm_eval_data as made
import pytest

from kvbench.tasks.lm_eval.load import manager, rows_from


def test_a_group_is_found_with_all_its_tasks() -> None:
    known = manager("bbh_fewshot")
    assert len(known.task_index["bbh_fewshot"].cfg["task"]) == 27
    assert set(known.task_index["bbh_fewshot"].cfg["task"]) <= set(known.task_index)


@pytest.mark.parametrize(
    "path", ["gsm8k_test.jsonl", "main/test-00000-of-00001.parquet", "gsm8k/main/test.parquet", "test.jsonl.gz"]
)
def test_rows_are_found_in_the_layouts_of_the_hub_and_in_plain_ones(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = made.gsm8k(3)
    (made.write_parquet if path.endswith("parquet") else made.write_jsonl)(tmp_path / "copy" / path, rows)
    for where in (tmp_path / "copy", tmp_path / "copy" / path):
        with rows_from(str(where)):
            found = datasets.load_dataset("openai/gsm8k", "main")
        assert list(found["test"]) == rows
        assert len(found["train"]) == 0
        assert found["train"].column_names == ["question", "answer"]
