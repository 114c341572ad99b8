"""What pictures of runs say about them, and which runs are one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from drawn_figures import lines_of, said
from plotted_runs import described, sample, write_run

from kvbench.identity.labels import in_words
from kvbench.report.figures import measured, remarks, score
from kvbench.terminal.errors import UsageError

OTT = {**described(None), "store": {"class": "kvbench.policies.stores.ott.OTT"}}


def test_a_picture_says_model_task_n_and_that_schedules_are_mixed(cells: list[measured.Measured]) -> None:
    ((_, figure),) = score.against_budget(cells, measured.looks(cells))
    assert "n = 10 examples for every point. Bars, and the grey band of the full cache: 95% intervals." in said(figure)
    assert figure.axes[0].get_title("left") == "niah"
    assert "Mixed schedules, which are different experiments" in said(figure)
    names = set(lines_of(figure.axes[0]))
    assert {"snapkv (grow)", "caote_snapkv (blocks of 128)", "cake"} <= names, "what most have goes without saying"


def test_one_schedule_is_said_once_and_names_are_bare(cells: list[measured.Measured]) -> None:
    alike = measured.choose(cells, policy=["h2o", "cake"])
    ((_, figure),) = score.against_budget(alike, measured.looks(alike))
    assert "All that evict: evicted once the whole prompt is in; one token evicted for each decoded one." in said(
        figure
    )
    assert set(lines_of(figure.axes[0])) == {"full", "h2o", "cake"}


def test_runs_that_differ_in_a_field_are_two_lines_that_say_so(tmp_path: Path) -> None:
    for window in (16, 32):
        parts = described("SnapKV")
        parts["scorer"]["window"] = window
        write_run(tmp_path, "snapkv", [sample(0, 1.0)], parts=parts)
    assert sorted(cell.policy for cell in measured.read(tmp_path)) == ["snapkv window=16", "snapkv window=32"]


def test_tasks_of_one_name_and_other_fields_are_two_panels(tmp_path: Path) -> None:
    for length in (1024, 4096):
        write_run(tmp_path, "snapkv", [sample(0, 1.0)], task="vt", task_fields={"length": length})
    panels = measured.panels_of(measured.read(tmp_path))
    assert [panel.task for panel in panels] == ["vt length=1024", "vt length=4096"]


def test_contexts_and_prompts_are_lines_of_their_own_and_the_full_cache_is_drawn_once(tmp_path: Path) -> None:
    for compress in ("context", "prompt"):
        write_run(tmp_path, "full", [sample(0, 1.0)], None, compress=compress)
        write_run(tmp_path, "snapkv", [sample(0, 1.0)], compress=compress)
        write_run(tmp_path, "ott", [sample(0, 1.0)], None, parts=OTT, compress=compress)
    cells = measured.read(tmp_path)
    names = sorted(cell.policy for cell in cells)
    assert names == ["full", "ott compress=context", "ott compress=prompt", "snapkv", "snapkv (whole prompt)"]
    ((_, figure),) = score.against_budget(cells, measured.looks(cells))
    assert "evicted once the whole context is in, before its question; decoded tokens all kept" in said(figure)


@pytest.mark.parametrize(
    ("moment", "words"),
    [
        ("context in blocks of 64", "evicted after every block of 64 tokens of the context, before its question"),
        ("context in one block", "evicted once the whole context is in, as one block, before its question"),
    ],
)
def test_how_a_context_is_compressed_is_said_in_words(moment: str, words: str) -> None:
    assert in_words(moment) == words


def test_the_same_cell_twice_is_refused(tmp_path: Path) -> None:
    for code in ("a", "b"):
        write_run(tmp_path, "snapkv", [sample(0, 1.0)], code=code)
    with pytest.raises(UsageError, match="computed by different code"):
        measured.read(tmp_path)


def test_a_failed_run_is_not_drawn_but_named(tmp_path: Path) -> None:
    write_run(tmp_path, "cake", [sample(0, 1.0), sample(1, 1.0)])
    write_run(tmp_path, "tova", [sample(0, 1.0), sample(1, None)], 96)
    runs = measured.read(tmp_path)
    ((_, figure),) = score.against_budget(runs, measured.looks(runs))
    assert set(lines_of(figure.axes[0])) == {"cake"}
    assert "Not drawn, because examples failed: tova at 96 on niah (1 of 2)." in said(figure)


def test_other_numbers_of_examples_are_said(tmp_path: Path) -> None:
    write_run(tmp_path, "cake", [sample(0, 1.0)])
    write_run(tmp_path, "tova", [sample(i, 1.0) for i in range(3)])
    assert "n = 1 to 3 examples for a point, not the same for all" in remarks.notes(measured.read(tmp_path))[0]


def test_other_examples_are_said(tmp_path: Path) -> None:
    write_run(tmp_path, "cake", [sample(0, 1.0)])
    write_run(tmp_path, "tova", [replace(sample(0, 1.0), prompt_hash="another")])
    assert "Not the same examples for all: niah." in remarks.notes(measured.read(tmp_path))
