"""What pictures of runs say about them, and which runs are one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from drawn_figures import lines_of, picture, said
from plotted_runs import described, sample, write_run

from kvbench.analysis.result import Result
from kvbench.identity.labels import in_words
from kvbench.report.figures import panels, remarks, score

OTT = {**described(None), "store": {"class": "kvbench.policies.stores.ott.OTT"}}


def test_a_picture_says_model_task_n_and_that_schedules_are_mixed(cells: list[Result]) -> None:
    figure = picture(score.against_budget, cells)
    assert "n = 10 examples for every point. Bars, and the grey band of the full cache: 95% intervals." in said(figure)
    assert figure.axes[0].get_title("left") == "niah"
    assert "Mixed schedules, which are different experiments" in said(figure)
    names = set(lines_of(figure.axes[0]))
    assert {"snapkv (grow)", "caote_snapkv (blocks of 128)", "cake"} <= names, "what most have goes without saying"


def test_contexts_and_prompts_are_lines_of_their_own_and_the_full_cache_is_drawn_once(tmp_path: Path) -> None:
    for compress in ("context", "prompt"):
        write_run(tmp_path, "full", [sample(0, 1.0)], None, compress=compress)
        write_run(tmp_path, "snapkv", [sample(0, 1.0)], compress=compress)
        write_run(tmp_path, "ott", [sample(0, 1.0)], None, parts=OTT, compress=compress)
    cells = panels.read(tmp_path)
    names = sorted(cell.line for cell in cells)
    assert names == ["full", "ott compress=context", "ott compress=prompt", "snapkv", "snapkv (whole prompt)"]
    figure = picture(score.against_budget, cells)
    assert "evicted once the whole context is in, before its question; decoded tokens all kept" in said(figure)
    blocks = "evicted after every block of 64 tokens of the context, before its question"
    assert in_words("context in blocks of 64") == blocks
    assert in_words("context in one block") == "evicted once the whole context is in, as one block, before its question"


def test_a_failed_run_is_not_drawn_but_named(tmp_path: Path) -> None:
    write_run(tmp_path, "cake", [sample(0, 1.0), sample(1, 1.0)])
    write_run(tmp_path, "tova", [sample(0, 1.0), sample(1, None)], 96)
    figure = picture(score.against_budget, panels.read(tmp_path))
    assert set(lines_of(figure.axes[0])) == {"cake"}
    assert "Not drawn, because examples failed: tova at 96 on niah (1 of 2)." in said(figure)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ([sample(i, 1.0) for i in range(3)], "n = 1 to 3 examples for a point, not the same for all"),
        ([replace(sample(0, 1.0), prompt_hash="another")], "Not the same examples for all: niah."),
    ],
)
def test_other_examples_and_other_numbers_of_them_are_said(tmp_path: Path, other: list, words: str) -> None:
    write_run(tmp_path, "cake", [sample(0, 1.0)])
    write_run(tmp_path, "tova", other)
    assert words in " ".join(remarks.notes(panels.read(tmp_path)))
