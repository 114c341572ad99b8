"""`python -m kvbench.tables run`, `scale=pocket`, predicted bytes and benchmarks beside the print."""

from dataclasses import replace
from pathlib import Path

import pytest
from command_lines import composed, first_of

from kvbench.analysis.load import load_results
from kvbench.identity.cell import Cell, build_cell
from kvbench.papers import arrangement
from kvbench.papers.choice import read_choice
from kvbench.papers.cli import main
from kvbench.papers.efficiency import beside, read_figures
from kvbench.papers.matching import differences, run_task
from kvbench.papers.pocket_table import pocket_runs
from kvbench.papers.protocol import Plan
from kvbench.papers.running import planned
from kvbench.papers.sweeps import in_sweeps

ONE = ("methods=full,snapkv", "budgets=128", "scale=pocket", "limit=1")


def planned_for(name: str, *given: str) -> list[Plan]:
    return planned(name, read_choice(given))


def cell_of(one: Plan, **fields: str) -> Cell:
    (sweep,) = in_sweeps([one])
    return build_cell(composed(*first_of([*sweep.words, *(f"{key}={value}" for key, value in fields.items())])))


# --- what is asked for ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "words", "runs"),
    [  # by the names of the paper or ours; a share as it is or as it is printed; the full cache stays
        (
            "caote/table2",
            "models=Llama-3.2-3B-Instruct methods=h2o budgets=4096 tasks=qasper",
            [("h2o_norecent", 4096)],
        ),
        (
            "caote/table2",
            "models=llama32_3b_instruct methods=h2o_norecent budgets=4096 tasks=qasper",
            [("h2o_norecent", 4096)],
        ),
        ("d2o/table1", "budgets=0.2 methods=full,d2o tasks=lcc", [("full", None), ("d2o", 0.2)]),
        ("d2o/table1", "budgets=20% methods=full,d2o tasks=lcc", [("full", None), ("d2o", 0.2)]),
    ],
)
def test_a_selection_takes_the_papers_names_and_ours(
    name: str, words: str, runs: list[tuple[str, int | float | None]]
) -> None:
    assert [(one.policy, one.budget) for one in planned_for(name, *words.split())] == runs


# --- a plan as a run ------------------------------------------------------------------------------------------------
def test_shares_stay_shares_lengths_become_ours_and_temperatures_of_other_models_go() -> None:
    """D2O's RULER at 16k to 128k: 1/32 of each; 4k and 8k would be shorter than any prompt of ours."""
    found = pocket_runs("d2o/table20", read_choice(["methods=d2o", "tasks=ruler_13", "scale=pocket"]))
    assert {one.budget for one in found} == {0.2}
    lengths = {one.settings["task.length"] for one in found if one.task == "ruler/niah_single_1"}
    assert lengths == {512, 1024, 2048, 4096}
    found = pocket_runs("cake/table5", read_choice(["methods=cake", "scale=pocket"]))
    assert not any(key.startswith("policy.allocator") for one in found for key in one.settings)


def test_a_table_is_run_on_the_pocket_model_and_printed_without_any_published_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "kvec/table1", *ONE]) == 0
    said = capsys.readouterr().out
    assert "kvec/table1: pocket model, not comparable in value: LongBench" in said
    full, compressed = (row.split() for row in said.splitlines() if row.startswith(("Full", "SnapKV")))
    assert full[1:10] == [*["100", "(21-100)"] * 4, "100"]
    assert 32 <= float(compressed[-2]) < 32 + 128, "a budget of 128 is 32 here, and new tokens are kept"
    printed = {n.printed for n in arrangement.numbers("kvec/table1") if "." in n.printed}
    assert not printed & set(said.split())
    runs = load_results(tmp_path / "results/runs")
    assert len(runs) == 8
    assert main(["compare", "kvec/table1", "scale=pocket", "--runs", "results/runs", "-o", "t.csv"]) == 0
    assert (tmp_path / "t.csv").read_text().count("\n") == 3
    # a run with a field that the plan does not set is another experiment
    one = next(plan for plan in planned_for("kvec/table1", *ONE) if (plan.policy, plan.task) == ("snapkv", "niah"))
    run = next(run for run in runs if run.slug == "snapkv" and run_task(run) == "niah")
    assert run.naming is not None
    assert differences(one, run.identity, run.naming.changed) == []
    bare = {key: value for key, value in one.settings.items() if key != "policy.scorer.window"}
    assert differences(replace(one, settings=bare), run.identity, run.naming.changed) == ["policy.scorer.window=8"]


BENCH = """paper,table,model,method,budget,budget_kind,task,metric,value,note,hardware,scale
cake,table13,Mistral-7B-Instruct-v0.3,full,,,latency_prompt7168_gen1024,total_seconds,20.0,,H100,1
cake,table13,Mistral-7B-Instruct-v0.3,snapkv,1024,tokens_per_head,latency_prompt7168_gen1024,total_seconds,15.0,,H100,1
cake,table13,Mistral-7B-Instruct-v0.3,cake,1024,tokens_per_head,latency_prompt7168_gen1024,total_seconds,,,H100,1
"""


def test_a_benchmark_joins_a_published_table_by_its_columns(tmp_path: Path) -> None:
    """SnapKV takes 33.74 of 34.54 s there (0.977 of full), 15 of 20 s here (0.75); CAKE did not fit."""
    (tmp_path / "cake_table13.csv").write_text(BENCH)
    grid = beside("cake/table13", read_figures(tmp_path))
    rows = {row.label: [cell.text for cell in row.cells] for row in grid.blocks[0].rows}
    assert rows["SnapKV, 1024, Total (s)"] == ["33.74", "15", "0.977", "0.75"]
    assert rows["CAKE, 1024, Total (s)"] == ["31.77", "", "0.92", ""]
    assert "H100, scale 1" in grid.notes[0][1]
    assert ("a", "did not fit into memory") in grid.notes
