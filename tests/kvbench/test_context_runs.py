"""`compress=context` on the command line: what is refused, what a run's files say, and what stands in every table."""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from small_cells import small_cell

from kvbench.cli import main
from kvbench.engine.compute import compute_runs
from kvbench.engine.prompts import make_prompts
from kvbench.errors import UsageError
from kvbench.results.__main__ import main as results
from kvbench.results.loading import load_results, read_result

ROWS = [
    {"context": "The mill by the weir is red. " * 6, "question": question, "answers": [answer], "max_new_tokens": 3}
    for question, answer in (("What colour is the mill?", "red"), ("Where is the mill?", "by the weir"))
]
CONTEXT = 1 + 6 * 29  # <s>, then one token a character


@pytest.fixture
def here(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Command lines about two questions on one context, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)) + "\n", encoding="utf-8")
    given = (f"model={tiny_model}", "task=context_question", "task.data_dir=rows.jsonl", "budget=40", "out=runs")
    return lambda *arguments: main([*(a for a in arguments if a == "-m"), *given, *(a for a in arguments if a != "-m")])


def test_compress_is_part_of_run_ids_and_shown_in_tables(
    here: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert here("-m", "policy=snapkv", "compress=prompt,context") == 0
    printed = capsys.readouterr().out
    said = " ".join(printed.split())
    assert [re.split(" {2,}", line)[:2] for line in printed.splitlines() if line.startswith("snapkv ")] == [
        ["snapkv", "whole prompt"],
        ["snapkv", "whole context"],
    ]
    assert "compress differs (context, prompt): a context is compressed before the question is known" in said
    runs = {run.identity["compress"]: run for run in load_results(tmp_path / "runs")}
    assert runs["context"].run_id != runs["prompt"].run_id
    asked = runs["context"].samples[0]
    assert (asked.prompt_tokens, asked.context_tokens) == (CONTEXT + 24, CONTEXT)
    assert asked.kept_tokens == [[40 + 24 + 2] * 2] * 2  # the context's, the question's, those generated but the last
    assert runs["prompt"].samples[0].kept_tokens == [[40 + 2] * 2] * 2
    assert "context_tokens" not in (runs["prompt"].folder / "samples.jsonl").read_text()
    assert results(["collect", "runs", "-o", "table.csv"]) == 0
    with (tmp_path / "table.csv").open(newline="") as table:
        assert {row["compress"]: row["policy"] for row in csv.DictReader(table)} == dict.fromkeys(runs, "snapkv")


def test_policies_receive_the_position_of_the_question(tiny_model: Path, tmp_path: Path) -> None:
    asking = ("finch", ""), ("finch_chunks", "block=64"), ("snapkv", "")
    cells = [small_cell(tmp_path, tiny_model, slug, 200, *filter(None, [field])) for slug, field in asking]
    context = small_cell(tmp_path, tiny_model, "full", 200, "compress=context")
    asked = [prompt.question for prompt in make_prompts(cells[0])]
    assert asked == [prompt.context_tokens for prompt in make_prompts(context)]
    assert compute_runs(cells) == [None] * 3
    alone = small_cell(tmp_path / "alone", tiny_model, "finch_chunks", 200, "block=64", "engine.rows=1")
    assert compute_runs([alone]) == [None]
    answers = [[s.output for s in read_result(cell.folder).samples] for cell in (cells[1], alone)]
    assert answers[0] == answers[1]
    passes = [sample.pre_pass_tokens for sample in read_result(cells[1].folder).samples]
    ends = [range(64, len(prompt.ids), 64) for prompt in make_prompts(cells[1])]
    left = [[last.stop - max(end, place or 0) for end in last] for last, place in zip(ends, asked, strict=True)]
    assert passes == [sum(tokens) for tokens in left]  # what is left of the question, after every block but the last
    with pytest.raises(UsageError, match="finch compresses a context by its question, which is not known"):
        small_cell(tmp_path, tiny_model, "finch", 200, "compress=context")
