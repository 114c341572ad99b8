"""The divergence from full in tables, figures and DataFrames: recorded aggregates, and what the commands show."""

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from shown_tables import shown_rows
from task_data import GOLDEN

import kvbench
from kvbench.cli import main
from kvbench.results.divergence import DivergenceNumbers, by_position
from kvbench.results.metrics import metrics
from kvbench.results.pairs import paired
from kvbench.results.samples import Divergence, Sample, SampleFile, read_samples
from kvbench.results.summary import outcomes_of


def sample(index: int, kl: list[float | None], **others: Any) -> Sample:
    fields: dict[str, Any] = dict.fromkeys(("delta_logprob", "delta_p"), [0.0] * len(kl))
    fields |= dict.fromkeys(("same_top", "agrees"), [1] * len(kl))
    return Sample(index, f"{index}", 9, [], divergence=Divergence("", kl, **{**fields, **others}))


def aggregate() -> dict[str, Any]:
    path = GOLDEN / "additions3" / "divergence.jsonl"
    if not path.is_file():
        pytest.skip(f"the recorded numbers are not at {path}")
    found: dict[str, Any] = next(row for line in path.open() if "examples" in (row := json.loads(line)))
    return found


def test_the_numbers_of_a_run_equal_the_recorded_aggregates() -> None:
    case = aggregate()
    samples = []
    for index, one in enumerate(case["examples"]):
        lists = {name: one[name] for name in ("delta_logprob", "delta_p")}
        lists["same_top"] = [int(x) for x in one["same_top"]]
        lists["agrees"] = [int(place != one["first_divergence"]) for place in range(len(one["kl"]))]
        samples.append(sample(index, one["kl"], **lists))
    found, tokens = metrics(samples), case["llama_cpp_statistics"]
    expected = {
        "kl": case["mean_of_examples"],
        "kl_over_tokens": tokens["mean"],
        "kl_median": tokens["median"],
        "kl_p90": tokens["p90"],
        "kl_p99": tokens["p99"],
        "kl_p999": tokens["p99_9"],
        "kl_max": tokens["maximum"],
        "rms_delta_p": tokens["rms_delta_p"],
        "same_top": case["same_top_of_examples"],
        "diverged_share": case["diverged_share"],
        "left_out": case["left_out"],
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-6)


def test_an_answer_that_never_differs_is_beyond_every_number_in_the_median() -> None:
    early = {"agrees": [1, 0, 1]}
    some = [sample(0, [0.0] * 3, **early), sample(1, [0.0] * 3), sample(2, [0.0] * 3, **early)]
    assert metrics(some)["first_divergence"] == 1
    assert metrics(some[1:])["first_divergence"] is None


def test_an_infinite_kl_is_counted_and_leaves_no_mean(tmp_path: Path) -> None:
    file = SampleFile(tmp_path / "samples.jsonl")
    file.append(sample(0, [0.5, None], delta_logprob=[0.0, None]))
    file.close()
    (read,) = read_samples(file.path)
    found = metrics([read])
    assert (found["kl"], found["kl_infinite"], found["kl_median"], found["kl_max"]) == (None, 1, 0.5, None)
    assert read.divergence is not None
    assert read.divergence.mean_kl == math.inf


def test_a_failed_example_leaves_no_divergence() -> None:
    found = metrics([sample(0, [0.5]), Sample(1, "1", 9, [], error="out of memory")])
    assert all(found[name] is None for name in DivergenceNumbers.__dataclass_fields__)


def test_two_policies_are_compared_on_the_same_examples() -> None:
    first = [sample(index, [0.25 * index, 0.25]) for index in range(8)]
    second = [sample(index, [0.25 * index, 0.75]) for index in range(8)]
    pair = paired(outcomes_of(first), outcomes_of(second))
    assert pair is not None
    assert (pair.difference.mean, pair.difference.low, pair.difference.high) == (0.25, 0.25, 0.25)
    assert pair.difference.claims


def test_bins_of_positions_double_in_length() -> None:
    samples = [sample(0, [1.0, 2.0, 4.0]), sample(1, [3.0, 4.0, 6.0, 8.0, 10.0])]
    assert by_position(samples) == [(1, 2.0, 2), (pytest.approx(6**0.5), 4.0, 2), (pytest.approx(20**0.5), 9.0, 1)]


TYPED = ("policy=full,knorm", "budget=24,64", "task=niah", "task.lengths=[300]", "task.depths=[0,0.5,1]")


@pytest.mark.slow("draws all figures twice")
def test_commands_show_the_divergence(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    few = ("task.repeats=2", "task.max_new_tokens=4", "task.divergence=true")
    assert main(["-m", f"model={tiny_model}", "device=cpu", "out=runs", *TYPED, *few]) == 0
    results = kvbench.load_results("runs")
    capsys.readouterr()
    rows = shown_rows(command(capsys, "results", "collect", "runs", "--metric", "kl"))
    assert [row[0] for row in rows] == ["full", "knorm", "knorm"]
    assert [row[2].split(" ")[0] for row in rows] == [f"{row.kl:.3g}" for row in results]
    command(capsys, "results", "collect", "runs", "-o", "all.csv")
    table = pd.read_csv("all.csv")
    assert table["kl"].tolist() == [row.kl for row in results]
    assert table["score"].isna().all()
    found = results.samples_df()
    means = found.groupby("run_id")["kl"].mean()
    assert [means[row.run_id] for row in results] == pytest.approx([row.kl for row in results])
    command(capsys, "plot", "runs", "-o", "figures")
    drawn = {path.stem for path in Path("figures").iterdir()}
    assert {"kl-budget", "kl-bytes", "kl-position-24", "kl-position-64"} <= drawn
    command(capsys, "report", "runs", "-o", "report.html")
    page = Path("report.html").read_text()
    assert f"{results[1].kl:.3g}" in page
    assert main(["results", "collect", "runs", "--metric", "score"]) == 2
    assert "--metric score: no run of runs has it" in capsys.readouterr().err


def command(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*words]) == 0
    return capsys.readouterr().out
