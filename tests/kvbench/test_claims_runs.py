"""Claims on our runs: made-up runs whose answer is known."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import plotted_runs
import pytest

from kvbench.analysis.load import load_results
from kvbench.analysis.statistics import paired_difference
from kvbench.claims import main
from kvbench.papers.claims.claim import Claim, Says, Trial
from kvbench.papers.claims.inference import judge_print
from kvbench.papers.claims.measured import Measured, judge_runs
from kvbench.papers.claims.printed import Compared, Unprinted
from kvbench.records.sample import Likelihood

TRIAL = Trial((("ours", "theirs"),), "pocket", "niah")
GROWS, EVICTS = {"class": "Prompt", "decode": "grow"}, {"class": "Prompt", "decode": "evict"}
SIX_OF_TEN = ([1.0] * 6 + [0.0] * 14, [0.0] * 16 + [1.0] * 4)


def claim(says: Says = "every", **trial: Any) -> Claim:
    """A claim that our runs of `ours` and `theirs` decide, unless the trial is another."""
    return Claim(
        "paper", "name", "a sentence", "1", "runs", Unprinted("nothing"), says, replace(TRIAL, **trial), "this"
    )


def write_run(
    out: Path, policy: str, scores: Any, budget: int = 64, schedule: object = GROWS, **about: list[str]
) -> None:
    """A run on disk; about: per name of metadata, one value per example."""
    samples = [
        plotted_runs.sample(i, None if score is None else float(score), **{k: v[i] for k, v in about.items()})
        for i, score in enumerate(scores)
    ]
    plotted_runs.write_run(out, policy, samples, budget, parts={**plotted_runs.described("X"), "schedule": schedule})


def write_both(out: Path, ours: Any, theirs: Any, budget: int = 64, **about: list[str]) -> None:
    write_run(out, "ours", ours, budget, **about)
    write_run(out, "theirs", theirs, budget, **about)


def verdict(out: Path, one: Claim) -> Measured:
    (found,) = judge_runs([(one, judge_print(one))], load_results(out))
    return found


def test_a_gain_in_every_example_holds_and_its_opposite_fails(tmp_path: Path) -> None:
    write_both(tmp_path, [1.0] * 20, [0.0] * 20)
    found = verdict(tmp_path, claim())
    assert found.verdict == "holds"
    (one,) = found.comparisons
    assert (one.difference.mean, one.difference.n, one.difference.method) == (1.0, 20, "tango")
    assert verdict(tmp_path, claim(pairs=(("theirs", "ours"),))).verdict == "fails"


def test_six_of_ten_cannot_be_told_and_the_number_that_would_is_said(tmp_path: Path) -> None:
    write_both(tmp_path, *SIX_OF_TEN)
    found = verdict(tmp_path, claim())
    assert found.verdict == "cannot be told"
    # differences: six 1, four -1, ten 0; mean .1, squares 10 - 20 * .01 = 9.8, variance 9.8 / 19; 7.8489 * 51.58
    assert found.needed == 405
    assert found.effect == pytest.approx(0.1)
    # where there is a published gain, it is that one which is to be seen; by hand: 44.57 - 41.41 or so
    one = replace(claim(), source=Compared(("kvec/table1",), (("kvec", ("snapkv",)),), budgets=(128,)))
    printed = judge_print(one).mean
    assert printed is not None
    assert verdict(tmp_path, one).effect == pytest.approx(printed / 100)


def test_holm_counts_all_claims_that_are_judged_together(tmp_path: Path) -> None:
    write_both(tmp_path, [1.0] * 6 + [0.5] * 4, [0.0] * 6 + [0.5] * 4)
    alone = verdict(tmp_path, claim())
    assert alone.verdict == "holds"
    assert alone.comparisons[0].adjusted == pytest.approx(alone.comparisons[0].p)
    rng = np.random.default_rng(0)
    weak = rng.normal(0.5, 0.2, 30).clip(0, 1)
    better = weak + 0.03 + rng.normal(0, 0.12, 30)
    write_run(tmp_path, "weak", weak)
    write_run(tmp_path, "better", better)
    one = claim(pairs=(("better", "weak"),))
    assert 0.001 < paired_difference(weak.tolist(), better.tolist()).p < 0.05
    assert verdict(tmp_path, one).verdict == "holds"
    asked_twice = judge_runs([(one, judge_print(one))] * 60, load_results(tmp_path))
    assert asked_twice[0].verdict == "holds", "one comparison, however many claims ask for it"
    crowd = [one, *(claim(pairs=(("better", "weak"),), least=-i / 1e9) for i in range(1, 60))]
    among = judge_runs([(each, judge_print(each)) for each in crowd], load_results(tmp_path))
    assert among[0].verdict == "cannot be told", "as one of sixty it may be chance"


def test_a_gain_has_to_pass_a_multiple_of_the_rival_or_keep_within_a_margin(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    theirs = rng.uniform(0.2, 0.4, size=50)
    write_both(tmp_path, 1.5 * theirs + rng.normal(0, 0.01, 50), theirs)
    for factor, expected in ((1.3, "holds"), (1.7, "fails")):
        assert verdict(tmp_path, claim(factor=factor)).verdict == expected
    full = rng.uniform(0.3, 0.7, size=50)
    plotted_runs.write_run(tmp_path, "full", [plotted_runs.sample(i, float(x)) for i, x in enumerate(full)], None)
    for name, loss, expected in (("close", 0.005, "holds"), ("far", 0.05, "fails")):
        write_run(tmp_path, name, full - loss + rng.normal(0, 0.005, size=50))
        assert verdict(tmp_path, claim(pairs=((name, "full"),), least=-0.01)).verdict == expected, name


def test_runs_of_another_schedule_or_budget_or_with_a_failed_example_are_no_pair(tmp_path: Path) -> None:
    write_run(tmp_path, "ours", [1.0] * 10)
    write_run(tmp_path, "theirs", [0.0] * 10, schedule=EVICTS)
    write_run(tmp_path, "theirs", [0.0] * 10, budget=128)
    found = verdict(tmp_path, claim())
    assert (found.verdict, found.comparisons) == ("no data", ())
    assert found.missing == "no such runs: python -m kvbench -m model=pocket task=niah policy=ours,theirs"
    write_run(tmp_path, "theirs", [0.0] * 9 + [None])
    assert verdict(tmp_path, claim()).verdict == "no data"
    undecided = replace(claim(), trial=None)
    assert verdict(tmp_path, undecided).missing == "not decided by runs: this"


def test_the_command_puts_runs_beside_the_print(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schedule = {"class": "Blocks", "size": 128, "decode": "evict"}
    write_run(tmp_path, "caote_h2o", [1.0] * 20, 2048, schedule)
    write_run(tmp_path, "h2o_norecent", [0.0] * 20, 2048, schedule)
    assert main(["--paper", "caote", "--runs", str(tmp_path)]) == 0
    assert "in our runs" in capsys.readouterr().out
    assert main(["--paper", "caote", "--runs", str(tmp_path), "-o", str(tmp_path / "claims.md")]) == 0
    said = (tmp_path / "claims.md").read_text(encoding="utf-8")
    assert "in our runs: holds" in said
    assert "pocket, niah at 2048: caote_h2o - h2o_norecent: +1.0000" in said
    assert "no such runs: python -m kvbench -m model=llama31_8b_instruct" in said


def test_of_given_texts_fewer_nats_are_better(tmp_path: Path) -> None:
    noise = np.random.default_rng(1).uniform(size=12) / 2
    for policy, nlls in (("ours", 2.0 + noise), ("theirs", 2.1 + noise + 0.01 * np.arange(12))):
        texts = [Likelihood(float(nll), 99, [100], [float(nll)], None, [[64]]) for nll in nlls]
        samples = [replace(plotted_runs.sample(i, 0.0), score=None, likelihood=text) for i, text in enumerate(texts)]
        plotted_runs.write_run(tmp_path, policy, samples, parts=plotted_runs.described("X"))
    found = verdict(tmp_path, claim())
    assert found.verdict == "holds"
    assert found.comparisons[0].difference.mean == pytest.approx(0.1 + 0.01 * 5.5)
