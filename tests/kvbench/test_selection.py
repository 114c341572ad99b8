"""Seeds are one row with their spread, and tables, figures and reports have the runs that are asked for."""

from pathlib import Path
from statistics import stdev

import pandas as pd
import pytest
from plotted_runs import answered, write_run

from kvbench.cli import main
from kvbench.results.loading import load_results
from kvbench.results.seeds import over_seeds


@pytest.fixture
def seeds(tmp_path: Path) -> Path:
    """full and two policies at two budgets with two seeds, each with prompts of its own."""
    out = tmp_path / "runs"
    for seed, right in ((0, 8), (1, 4)):
        prompts = [f"{seed}{i}".ljust(64, "0") for i in range(10)]
        write_run(out, "full", [answered(i, 1.0, prompt=p) for i, p in enumerate(prompts)], None, seed=seed)
        for policy, budget in (("h2o", 64), ("h2o", 128), ("tova", 64)):
            lines = [answered(i, float(i < right), prompt=prompt) for i, prompt in enumerate(prompts)]
            write_run(out, policy, lines, budget, seed=seed)
    return out


def test_seeds_with_prompts_of_their_own_are_one_row_over_all_prompts(seeds: Path) -> None:
    rows = over_seeds(load_results(seeds))
    assert [(row.policy, row.budget, row.n_seeds, row.n) for row in rows] == [
        ("full", None, 2, 20),
        ("h2o", 64, 2, 20),
        ("tova", 64, 2, 20),
        ("h2o", 128, 2, 20),
    ]
    assert rows[1].score == 0.6
    assert rows[1].seed_sd == pytest.approx(stdev([0.8, 0.4]))
    assert rows[1].ends == pytest.approx((0.3866, 0.7812), abs=1e-4)  # Wilson's interval of 12 in 20


def test_joined_rows_are_compared_with_the_full_cache_of_all_seeds(seeds: Path, tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    assert main(["results", "collect", str(seeds), "--over-seeds", "-o", str(table)]) == 0
    rows = pd.read_csv(table).set_index(["policy", "budget"])
    assert len(rows) == 4
    tova = rows.loc["tova"].iloc[0]
    assert (tova["n_seeds"], tova["n"], tova["score_vs_full"]) == (2, 20, -0.4)


def test_a_table_and_a_report_have_the_selected_runs_and_the_full_cache(
    seeds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, page = tmp_path / "table.csv", tmp_path / "report.html"
    asked = ["--policy", "h2o,tova", "--budget", "64"]
    assert main(["results", "collect", str(seeds), *asked, "-o", str(table)]) == 0
    assert sorted(map(str, pd.read_csv(table)["policy"])) == ["full", "full", "h2o", "h2o", "tova", "tova"]
    assert main(["report", str(seeds), "--policy", "tova", "-o", str(page)]) == 0
    text = page.read_text()
    assert text.count("<tr title=") == 2
    assert "4 runs in 2 rows, with seeds joined" in text
    assert main(["report", str(seeds), "--each-seed", "-o", str(page)]) == 0
    assert page.read_text().count("<tr title=") == 8
    for command, output in ((["report"], "a.html"), (["results", "collect"], "a.csv")):
        assert main([*command, str(seeds), "--policy", "tovo", "-o", f"{tmp_path}/{output}"]) == 2
        assert "--policy tovo is not a value of any run: did you mean tova?" in capsys.readouterr().err
