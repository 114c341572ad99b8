"""What becomes of scored texts in metrics, tables and the picture: numbers worked by hand."""

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from kvbench.analysis.load import read_result
from kvbench.analysis.metrics import metrics
from kvbench.analysis.statistics import paired_difference, weighted_interval
from kvbench.engine.likelihood import summed_up
from kvbench.records.files import write_json, write_yaml
from kvbench.records.sample import Likelihood, Sample
from kvbench.records.samples import open_samples, read_samples
from kvbench.report.command import main
from kvbench.report.table import print_table


def text(index: int, nll: list[float], first: int = 1, block: int | None = 4, most: int = 9) -> Sample:
    likelihood = summed_up(torch.tensor(nll), first, block, torch.tensor([[most, most - 1]]))
    held: dict[str, Any] = {"kept_tokens": [[5, 5]], "cache_bytes": 100, "peak_bytes": 200, "full_cache_bytes": 400}
    return Sample(index, f"{index:064d}", first + len(nll), [], {}, **held, prefill_seconds=0.5, likelihood=likelihood)


def write_run(out: Path, policy: str, texts: list[Sample], budget: int | None = 5, task: str = "pg19") -> Path:
    folder = out / f"{policy.split()[0]}-{budget}-{task}"
    folder.mkdir(parents=True)
    with open_samples(folder / "samples.jsonl") as file:
        for one in texts:
            file.append(one)
    whole = {"scorer": None, "store": {"class": "kvbench.policies.stores.dense.Dense"}}
    kept = whole if policy == "full" else {}
    identity = {"model": {"sha256": "a"}, "dtype": "float32", "policy": kept, "budget": budget, "task": {"name": task}}
    identity |= {"seed": 0, "generation": {"decoding": "greedy"}}
    names = {"policy": policy, "model": "pocket", "task": task}
    write_yaml(folder / "config.yaml", {"run_id": folder.name, "names": names, "identity": identity})
    hardware = {"device_name": None, "processor": "a processor"}
    write_json(folder / "environment.json", {"kvbench_revision": "cafe", "hardware": hardware})
    write_json(folder / "metrics.json", metrics(texts))
    return folder


# Token 0 is never scored; tokens 1 to 8 cost 1, 3, 5, 7, 9, 11, 13, 15: by hand their mean is 8.
ODD = [1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0]


def test_the_mean_so_far_stands_at_powers_of_two_and_at_the_end() -> None:
    got = summed_up(torch.tensor(ODD), 1, 4, torch.zeros(1, 1))
    assert got.lengths == [2, 4, 8, 9]  # the first 2 tokens hold one scored token, the first 9 all eight
    assert got.cumulative == [1.0, 3.0, 7.0, 8.0]
    assert (got.nll, got.tokens, got.block) == (8.0, 8, 4)
    assert got.sum_at(8) == (49.0, 7)


def test_after_a_prompt_the_mean_so_far_begins_with_the_first_token_after_it() -> None:
    got = summed_up(torch.tensor(ODD), 5, 1, torch.zeros(1, 1))
    assert (got.lengths, got.cumulative) == ([8, 13], [3.0, 8.0])  # tokens 5, 6, 7 of the first 8; nothing at 2 and 4
    assert summed_up(torch.tensor([2.0]), 7, 1, torch.zeros(1, 1)).lengths == [8]


def test_a_long_text_weighs_more_than_a_short_one() -> None:
    got = metrics([text(0, [1.0, 1.0, 1.0]), text(1, [5.0], most=12)])["likelihood"]
    assert got["nll"] == 2.0  # (3 + 5) / 4 tokens, not (1 + 5) / 2 texts
    assert got["perplexity"] == pytest.approx(math.exp(2.0))
    assert (got["scored_tokens"], got["block"], got["mean_over"]) == (4, 4, "tokens")
    assert got["max_kept_tokens"] == [[12, 11]]
    assert (got["nll_low"], got["nll_high"]) == (1.0, 5.0)
    assert got["curve"] == {"lengths": [2, 4], "nll": [3.0, 1.0], "texts": [2, 1]}


def test_where_a_text_ends_the_curve_has_no_point_unless_all_texts_have_one() -> None:
    got = metrics([text(0, ODD[:5]), text(1, ODD)])["likelihood"]["curve"]
    assert got["lengths"] == [2, 4, 8, 9]  # 6, where the first ends, is missing: the second says nothing of it
    assert got["texts"] == [2, 2, 1, 1]
    same = metrics([text(0, ODD[:5]), text(1, ODD[:5])])["likelihood"]["curve"]
    assert (same["lengths"], same["texts"]) == ([2, 4, 6], [2, 2, 2])


def test_one_text_has_no_interval_and_a_failed_one_leaves_no_mean() -> None:
    alone = metrics([text(0, ODD)])["likelihood"]
    assert (alone["nll"], alone["nll_low"], alone["interval"]) == (8.0, None, None)
    broken = Sample(1, "x", 9, [], error="BudgetError: too much")
    assert metrics([text(0, ODD), broken])["likelihood"]["nll"] is None
    assert metrics([text(0, ODD)])["score"] is None


def test_tokens_that_are_given_have_a_line_of_their_own_kind(tmp_path: Path) -> None:
    with open_samples(tmp_path / "samples.jsonl") as file:
        file.append(text(0, ODD))
        file.append(Sample(1, "x", 9, ["a"], output="a", score=1.0))
    given, asked = (json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines())
    assert given["likelihood"]["nll"] == 8.0
    assert "likelihood" not in asked
    assert read_samples(tmp_path / "samples.jsonl")[0] == text(0, ODD)
    assert isinstance(read_samples(tmp_path / "samples.jsonl")[0].likelihood, Likelihood)


def test_the_weighted_mean_and_its_interval() -> None:
    assert paired_difference([0.0, 0.0], [1.0, 5.0], weights=[3, 1]).mean == 2.0
    got = weighted_interval([1.0, 5.0], [3, 1])
    assert (got.low, got.high, got.method) == (1.0, 5.0, "bootstrap")  # drawn twice the same, in half of all draws
    even = weighted_interval([1.0, 2.0, 4.0], [1, 1, 1])
    assert 1.0 <= even.low < 7 / 3 < even.high <= 4.0
    with pytest.raises(ValueError, match="two values or more"):
        weighted_interval([1.0], [1])


def shifted(by: float) -> list[Sample]:
    return [text(0, [1.0 + by, 1.0 + by, 1.0 + by]), text(1, [2.0 + 3 * by])]


def test_the_table_says_that_lower_is_better_and_how_much_worse_than_full(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [write_run(tmp_path, "full", shifted(0.0), None), write_run(tmp_path, "h2o (m=4)", shifted(0.2))]
    print_table([read_result(folder) for folder in folders])
    lines = capsys.readouterr().out.splitlines()
    head = [line.split() for line in lines[: lines.index("", 2)]]
    assert ["NLL,", "lower", "is", "better"] in [words[:4] for words in head]
    assert not any("score" in words for words in head)
    full, h2o = (next(line for line in lines if line.startswith(f"{name} ")) for name in ("full", "h2o"))
    assert "1.2500 (1.000-2.000)" in full  # (3 * 1 + 2) / 4
    # 0.2 for three tokens and 0.6 for one: 0.3 a token, between 0.2 and 0.6 as texts are drawn
    assert "+0.3000 (+0.200..+0.600) " in h2o, "two texts claim nothing"
    assert f"{math.exp(1.55) - math.exp(1.25):+.4g}" in h2o
    assert f"{math.exp(1.55):.4g}" in h2o


def test_runs_with_and_without_answers_are_two_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [Sample(0, "x", 9, ["a"], output="a", score=1.0, kept_tokens=[[9, 9]])]
    folders = [write_run(tmp_path, "full", asked, None, "niah"), write_run(tmp_path, "h2o (m=4)", [text(0, ODD)])]
    print_table([read_result(folder) for folder in folders])
    out = capsys.readouterr().out
    assert out.count("PPL") == out.count("score (95% CI)") == 1
    assert "8.0000 (one text)" in out
    assert "1.000 (0.21-1.00)" in out


def test_the_tidy_table_has_the_gap_to_full(tmp_path: Path) -> None:
    for policy, by, budget in (("full", 0.0, None), ("h2o (m=4)", 0.2, 5)):
        write_run(tmp_path / "runs", policy, shifted(by), budget)
    assert main(["collect", str(tmp_path / "runs"), "-o", str(tmp_path / "table.csv")]) == 0
    table = pd.read_csv(tmp_path / "table.csv").set_index("policy")
    row = table.loc["h2o (m=4)"]
    assert (row["nll"], row["nll_vs_full"], row["nll_vs_full_high"]) == (
        pytest.approx(1.55),
        pytest.approx(0.3),
        pytest.approx(0.6),
    )
    assert row["perplexity_gap"] == pytest.approx(math.exp(1.55) - math.exp(1.25))  # as in CAOTE, table 4
    assert (row["scored_tokens"], row["block"], json.loads(row["max_kept_tokens"])) == (4, 4, [[9, 8]])
    assert json.loads(row["nll_curve"])["lengths"] == [2, 4]
    assert pd.isna(row["score"])
    assert pd.isna(table.loc["full", "nll_vs_full"])


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_the_curves_are_drawn_one_line_a_run(tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "runs", "full", [text(0, ODD), text(1, ODD[:5])], None)
    write_run(tmp_path / "runs", "h2o (m=4)", [text(0, ODD)])
    write_run(tmp_path / "runs", "full", [Sample(0, "x", 9, ["a"], output="a", score=1.0)], None, "niah")
    picture = tmp_path / f"nll{suffix}"
    assert main(["curve", str(tmp_path / "runs"), "-o", str(picture)]) == 0
    assert "2 lines" in capsys.readouterr().out
    assert picture.stat().st_size > 5000
    if suffix == ".svg":
        assert "h2o (m=4), 5" in picture.read_text(encoding="utf-8")


def test_without_a_scored_text_there_is_no_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "runs", "full", [Sample(0, "x", 9, ["a"], output="a", score=1.0)], None, "niah")
    assert main(["curve", str(tmp_path / "runs"), "-o", str(tmp_path / "nll.svg")]) == 2
    assert "no run has scored given texts" in capsys.readouterr().err
    write_run(tmp_path / "runs", "h2o (m=4)", [text(0, ODD)])
    assert main(["curve", str(tmp_path / "runs"), "-o", str(tmp_path / "nll.jpeg")]) == 2
    assert "end in one of .svg, .png, .pdf" in capsys.readouterr().err
