"""What a reader reads is a column beside what is held: in samples, results and tables."""

from pathlib import Path

import pytest
from shown_tables import shown_rows

from kvbench import load_results
from kvbench.cli import main


def test_a_table_shows_tokens_read_and_tokens_held(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    how = ["task=niah", "task.lengths=[300]", "task.depths=[0.5]", "task.repeats=1", "task.max_new_tokens=5"]
    how += [f"model={tiny_model}", f"out={tmp_path}", "task.stop=[]", "device=cpu"]
    assert main(["-m", "policy=full,quest", "budget=64", *how]) == 0
    printed = capsys.readouterr().out
    rows = shown_rows(printed)[:2]
    assert "read/KV" in printed
    assert [row[-1] for row in rows] != []
    found = {row.policy: row for row in load_results(tmp_path)}
    full, own = found["full"], found["quest"]
    assert own.kept_tokens == full.kept_tokens
    assert own.read_tokens is not None
    assert own.read_bytes is not None
    assert (own.budget, own.evicts, own.is_full, full.read_tokens, full.budget) == (64, False, False, None, None)
