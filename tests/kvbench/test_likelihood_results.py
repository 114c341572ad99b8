"""What becomes of scored texts in metrics, tables and the picture: numbers worked by hand."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from plotted_runs import read, write_run

from kvbench.engine.scores import summary
from kvbench.report.table import print_table
from kvbench.results.loading import load_results
from kvbench.results.metrics import metrics
from kvbench.results.samples import Sample
from kvbench.results.statistics import paired_difference, weighted_interval


def test_a_long_text_weighs_more_than_a_short_one() -> None:
    longer = replace(read(1, [5.0]), likelihood=summary(torch.tensor([5.0]), 1, 4, torch.tensor([[12, 11]])))
    got = metrics([read(0, [1.0, 1.0, 1.0]), longer])["likelihood"]
    assert got["nll"] == 2.0  # (3 + 5) / 4 tokens, not (1 + 5) / 2 texts
    assert got["perplexity"] == pytest.approx(math.exp(2.0))
    assert (got["scored_tokens"], got["block"], got["mean_over"]) == (4, 4, "tokens")
    assert got["max_kept_tokens"] == [[12, 11]]
    assert got["nll_low"] is got["nll_high"] is None, "two texts have no interval"
    five = metrics([read(i, [float(i)]) for i in range(5)])["likelihood"]
    assert 0 <= five["nll_low"] < 2 < five["nll_high"] <= 4
    assert got["curve"] == {"lengths": [2, 4], "nll": [3.0, 1.0], "texts": [2, 1]}


def test_the_weighted_mean_and_its_interval() -> None:
    assert paired_difference([0.0, 0.0], [1.0, 5.0], weights=[3, 1]).mean == 2.0
    got = weighted_interval([1.0, 5.0], [3, 1])
    assert (got.low, got.high, got.method) == (1.0, 5.0, "bootstrap")  # drawn twice the same, in half of all draws
    even = weighted_interval([1.0, 2.0, 4.0], [1, 1, 1])
    assert 1.0 <= even.low < 7 / 3 < even.high <= 4.0
    with pytest.raises(ValueError, match="two values or more"):
        weighted_interval([1.0], [1])


def shifted(by: float) -> list[Sample]:
    return [read(0, [1.0 + by, 1.0 + by, 1.0 + by]), read(1, [2.0 + 3 * by])]


def test_the_table_says_that_lower_is_better_and_how_much_worse_than_full(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, "full", shifted(0.0), None)
    write_run(tmp_path, "h2o", shifted(0.2))
    print_table(load_results(tmp_path))
    lines = capsys.readouterr().out.splitlines()
    head = [line.split() for line in lines[: lines.index("", 2)]]
    assert "NLL: nats per token, lower is better" in "\n".join(lines)
    assert any("NLL" in words for words in head)
    assert not any("score" in words for words in head)
    full, h2o = (next(line for line in lines if line.startswith(f"{name} ")) for name in ("full", "h2o"))
    assert "1.2500  " in full  # (3 * 1 + 2) / 4
    # 0.2 for three tokens and 0.6 for one: 0.3 a token
    assert "+0.3000  " in h2o, "two texts have no interval"
    assert f"{math.exp(1.55) - math.exp(1.25):+.4g}" in h2o
    assert f"{math.exp(1.55):.4g}" in h2o
