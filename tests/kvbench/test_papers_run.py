"""`python -m kvbench.tables run`, `scale=pocket`, predicted bytes and benchmarks beside the print."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.analysis.load import load_results
from kvbench.config.overrides import check
from kvbench.engine.run import run_cells
from kvbench.identity.cell import Cell, build_cell
from kvbench.papers import arrangement, pocket
from kvbench.papers.choice import read_choice
from kvbench.papers.cli import main
from kvbench.papers.efficiency import beside, read_figures
from kvbench.papers.lost import printed_cells
from kvbench.papers.matching import differences
from kvbench.papers.picture import Dot, alike, dots
from kvbench.papers.pocket_table import pocket_runs, pocket_table
from kvbench.papers.protocol import Plan, plan
from kvbench.papers.running import planned
from kvbench.papers.sweeps import in_sweeps
from kvbench.records.definition import read_definition
from kvbench.terminal.errors import UsageError

ONE = ("methods=full,snapkv", "budgets=128", "scale=pocket", "limit=1")


def planned_for(name: str, *given: str) -> list[Plan]:
    return planned(name, read_choice(given))


def cell_of(one: Plan, **fields: str) -> Cell:
    (sweep,) = in_sweeps([one])
    (asked,) = check([*sweep.words, *(f"{key}={value}" for key, value in fields.items())]).cells
    return build_cell(asked.config, one.policy, one.model, asked.preset)


# --- what is asked for ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "words",
    [("models=llama32_3b_instruct", "methods=h2o_norecent"), ("models=Llama-3.2-3B-Instruct", "methods=h2o")],
)
def test_a_selection_takes_the_papers_names_and_ours(words: tuple[str, ...]) -> None:
    (one,) = planned_for("caote/table2", *words, "budgets=4096", "tasks=qasper")
    assert (one.model, one.policy, one.budget, one.task) == (
        "llama32_3b_instruct",
        "h2o_norecent",
        4096,
        "longbench/qasper",
    )


def test_a_budget_is_chosen_as_a_share_or_as_it_is_printed_and_the_full_cache_stays() -> None:
    for said in ("0.2", "20%"):
        found = planned_for("d2o/table1", f"budgets={said}", "methods=full,d2o", "tasks=lcc")
        assert [(one.policy, one.budget) for one in found] == [("full", None), ("d2o", 0.2)]


def test_an_average_asks_for_all_its_parts_once() -> None:
    found = planned_for("cake/table5", "methods=cake", "budgets=128", "tasks=avg,qasper")
    assert len(found) == 16
    assert {one.settings["policy.allocator.tau2"] for one in found} == {2.3}


def test_what_is_left_must_be_something() -> None:
    with pytest.raises(UsageError, match=r"budgets=2\.4 methods=ott_g128_r32 leaves no number of ott/table8"):
        read_choice(["budgets=2.4", "methods=ott_g128_r32"]).numbers("ott/table8")
    with pytest.raises(UsageError, match="budgets=2048 is not in caote/table7, choose one of 6144, 8192"):
        planned_for("caote/table7", "budgets=2048")


def test_numbers_that_the_text_has_lost_are_asked_for_as_well() -> None:
    """Table 2 of CAOTE has (1 + 9 x 2) x 17 numbers for each of two models, of which 501 can be read."""
    cells = printed_cells("caote/table2")
    assert len(cells) == 2 * (1 + 9 * 2) * 17
    assert sum(bool(number.printed) for number in cells) == 501
    assert len(planned_for("caote/table2")) == 2 * (1 + 9 * 2) * 16


# --- a plan as a run ------------------------------------------------------------------------------------------------
@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for SLURM: `sbatch` keeps the script it is given and calls the array 7; returns where the script is."""
    kept = tmp_path / "script"
    program = tmp_path / "bin" / "sbatch"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ncat > {kept}\necho 7\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    return kept


def test_what_is_missing_of_a_table_is_submitted_as_one_sweep(
    sbatch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two policies on the four stand-ins of LongBench: eight cells, in one job for each task."""
    monkeypatch.chdir(tmp_path)
    assert main(["run", "kvec/table1", *ONE, "launcher=slurm", "launcher.partition=gpu"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "submitted: array 7, 4 jobs, 8 cells"
    assert said[-1].startswith(
        "python -m kvbench.tables compare kvec/table1 methods=full,snapkv budgets=128 scale=pocket"
    )
    script = sbatch.read_text()
    assert "#SBATCH --job-name=kvbench-kvec_table1" in script
    assert "#SBATCH --array=0-3" in script
    assert "#SBATCH --partition=gpu" in script
    definition = read_definition(tmp_path / "results/runs")
    assert len(definition.cells) == 8
    assert definition.commands == (
        "python -m kvbench.tables run kvec/table1 methods=full,snapkv budgets=128 scale=pocket limit=1 "
        "launcher=slurm launcher.partition=gpu",
    )
    assert {cell.run_id for cell in definition.cells} == {
        cell_of(one).run_id for one in planned_for("kvec/table1", *ONE)
    }


# --- the pocket model -----------------------------------------------------------------------------------------------
def test_prompts_budgets_blocks_and_windows_shrink_alike() -> None:
    """CAOTE's table 2: 8,192 tokens become 2,048, so a budget of 4,096 is 1,024, a block of 128 is 32, a window 8."""
    own = next(plan(n) for n in arrangement.numbers("caote/table2") if (n.method, n.budget) == ("caote_snapkv", 4096))
    assert isinstance(own, Plan)
    found = pocket.scaled(own)
    assert [one.task for one in found] == ["longbench/lookups", "niah", "ruler/niah_single_1", "ruler/niah_multikey_2"]
    for one in found:
        assert (one.model, one.budget) == ("pocket", 1024)
        assert {**one.settings, "block": 32, "policy.scorer.window": 8} == dict(one.settings)
        assert one.settings.get("task.lengths", [one.settings.get("task.length", 2048)]) == [2048]


def test_shares_stay_shares_and_lengths_of_a_table_become_lengths_of_ours() -> None:
    """D2O's RULER at 16k to 128k: 1/32 of each; 4k and 8k would be shorter than any prompt of ours."""
    found = pocket_runs("d2o/table20", read_choice(["methods=d2o", "tasks=ruler_13", "scale=pocket"]))
    assert {one.budget for one in found} == {0.2}
    lengths = {one.settings["task.length"] for one in found if one.task == "ruler/niah_single_1"}
    assert lengths == {512, 1024, 2048, 4096}


def test_temperatures_of_other_models_are_not_used_on_the_pocket_model() -> None:
    found = pocket_runs("cake/table5", read_choice(["methods=cake", "scale=pocket"]))
    assert not any(key.startswith("policy.allocator") for one in found for key in one.settings)


def test_a_table_is_run_on_the_pocket_model_and_printed_without_any_published_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "kvec/table1", *ONE]) == 0
    said = capsys.readouterr().out
    head, full, compressed = (
        said.splitlines()[0],
        *(row for row in said.splitlines() if row.startswith(("Full", "SnapKV"))),
    )
    assert head.startswith("kvec/table1: pocket model, not comparable in value: LongBench")
    assert full.split()[1:10] == [*["100", "(21-100)"] * 4, "100"]
    assert 32 <= float(compressed.split()[-2]) < 32 + 128, "a budget of 128 is 32 here, and new tokens are kept"
    printed = {n.printed for n in arrangement.numbers("kvec/table1") if "." in n.printed}
    assert not printed & set(said.split())
    assert len(load_results(tmp_path / "results/runs")) == 8
    assert main(["compare", "kvec/table1", "scale=pocket", "--runs", "results/runs", "-o", "t.csv"]) == 0
    assert f"{len(pocket_runs('kvec/table1', read_choice(['scale=pocket']))) - 8} runs are missing" not in said
    assert (tmp_path / "t.csv").read_text().count("\n") == 3


def test_a_pocket_table_that_was_not_run_says_how() -> None:
    with pytest.raises(UsageError, match="caote/table2 was not run on the pocket model"):
        pocket_table("caote/table2", read_choice(["scale=pocket"]), [])


# --- which run is about a number ------------------------------------------------------------------------------------
def test_a_run_with_a_field_that_the_plan_does_not_set_is_another_experiment(tmp_path: Path) -> None:
    one = pocket_runs("kvec/table1", read_choice(["methods=snapkv", "budgets=128", "scale=pocket"]))[0]
    (ending,) = run_cells([cell_of(one, out=str(tmp_path), limit="1")])
    assert ending.error is None
    (run,) = load_results(tmp_path)
    assert run.naming is not None
    assert differences(one, run.identity, run.naming.changed) == []
    bare = {key: value for key, value in one.settings.items() if key != "policy.scorer.window"}
    assert differences(replace(one, settings=bare), run.identity, run.naming.changed) == ["policy.scorer.window=8"]


# --- bytes and seconds ----------------------------------------------------------------------------------------------
def test_models_whose_methods_hold_the_same_share_are_one_panel() -> None:
    found = [
        Dot("a", "x", "64", 1.0),
        Dot("b", "x", "64", 1.001),
        Dot("b", "y", "64", 2.0),
        Dot("c", "x", "64", 1.5),
    ]
    assert [(models, len(dots)) for models, dots in alike(found)] == [(["a", "b"], 2), (["c"], 1)]


def test_a_method_is_drawn_where_one_of_its_numbers_can_be_run() -> None:
    """OTT's first number of Llama-2-7B is a ratio of seconds, which no run is about; its LongBench is."""
    found = {(dot.model, dot.method): dot.percent for dot in dots(arrangement.tables("ott"), 8192)}
    assert found["Llama-2-7B-chat-hf", "OTT (G=128, R=32)"] is not None


def test_the_picture_of_a_paper_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bytes", "kvec", "-o", str(tmp_path / "kvec.svg")]) == 0
    assert "K-VEC" in capsys.readouterr().out
    assert (tmp_path / "kvec.svg").read_text().startswith("<?xml")


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


def test_a_folder_without_a_benchmark_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no table that"):
        read_figures(tmp_path)
    (tmp_path / "x.csv").write_text(BENCH)
    with pytest.raises(UsageError, match="--bench has nothing of d2o/table5"):
        beside("d2o/table5", read_figures(tmp_path))
