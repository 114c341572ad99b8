"""Claims on our runs: made-up runs whose answer is known."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvbench.analysis.load import load_results
from kvbench.analysis.metrics import metrics
from kvbench.analysis.statistics import paired_difference
from kvbench.claims import judge, main
from kvbench.papers.claims.claim import Claim, Says, Trial
from kvbench.papers.claims.inference import holm, judge_print
from kvbench.papers.claims.measured import Comparison, Measured, judge_runs
from kvbench.papers.claims.printed import Compared, Unprinted
from kvbench.records.files import write_json, write_yaml
from kvbench.records.sample import Likelihood, Sample
from kvbench.records.samples import open_samples

TRIAL = Trial((("ours", "theirs"),), "pocket", "niah")
GROWS, EVICTS = {"class": "Prompt", "decode": "grow"}, {"class": "Prompt", "decode": "evict"}


def claim(trial: Trial | None = TRIAL, says: Says = "every", name: str = "name") -> Claim:
    return Claim("paper", name, "a sentence", "1", "runs", Unprinted("nothing"), says, trial, "or this")


def write_run(
    out: Path,
    policy: str,
    scores: list[float | None],
    budget: int = 64,
    schedule: object = GROWS,
    **metadata: list[str],
) -> None:
    """A run on disk; metadata: per name, one value per example."""
    folder = out / f"{policy}-{budget}-{len(list(out.glob('*')))}"
    folder.mkdir(parents=True)
    samples = [
        Sample(i, f"{i:064d}", 100, ["x"], {key: values[i] for key, values in metadata.items()}, "x", score)
        for i, score in enumerate(scores)
    ]
    save(folder, samples, policy, budget, schedule)


def save(folder: Path, samples: list[Sample], policy: str, budget: int, schedule: object) -> None:
    with open_samples(folder / "samples.jsonl") as file:
        for sample in samples:
            file.append(sample)
    alike = {"model": {"sha256": "abc"}, "dtype": "float32", "task": {"class": "Niah"}, "seed": 0, "generation": {}}
    identity = {**alike, "policy": {"class": "Policy", "schedule": schedule or {"decode": "grow"}}, "budget": budget}
    names = {"policy": f"{policy} (grow)", "model": "pocket", "task": "niah"}
    write_yaml(folder / "config.yaml", {"run_id": folder.name, "names": names, "identity": identity, "config": {}})
    write_json(folder / "environment.json", {"kvbench_revision": "cafe", "hardware": {}})
    write_json(folder / "metrics.json", metrics(samples))


def verdict(out: Path, one: Claim) -> Measured:
    (found,) = judge_runs([(one, judge_print(one))], load_results(out))
    return found


def test_a_gain_in_every_example_holds_and_its_opposite_fails(tmp_path: Path) -> None:
    write_run(tmp_path, "ours", [1.0] * 20)
    write_run(tmp_path, "theirs", [0.0] * 20)
    found = verdict(tmp_path, claim())
    assert found.verdict == "holds"
    (one,) = found.comparisons
    assert (one.difference.mean, one.difference.n, one.difference.method) == (1.0, 20, "tango")
    assert verdict(tmp_path, claim(replace(TRIAL, pairs=(("theirs", "ours"),)))).verdict == "fails"


def test_six_of_ten_cannot_be_told_and_the_number_that_would_is_said(tmp_path: Path) -> None:
    ours, theirs = [1.0] * 6 + [0.0] * 14, [0.0] * 16 + [1.0] * 4
    write_run(tmp_path, "ours", ours)
    write_run(tmp_path, "theirs", theirs)
    found = verdict(tmp_path, claim())
    assert found.verdict == "cannot be told"
    # differences: six 1, four -1, ten 0; mean .1, squares 10 - 20 * .01 = 9.8, variance 9.8 / 19; 7.8489 * 51.58
    assert found.needed == 405
    assert found.effect == pytest.approx(0.1)


def test_the_gain_to_be_seen_is_the_published_one_where_there_is_one(tmp_path: Path) -> None:
    write_run(tmp_path, "ours", [1.0] * 6 + [0.0] * 14)
    write_run(tmp_path, "theirs", [0.0] * 16 + [1.0] * 4)
    source = Compared(("kvec/table1",), (("kvec", ("snapkv",)),), budgets=(128,))  # by hand: 44.57 - 41.41 or so
    one = replace(claim(), source=source)
    printed = judge_print(one)
    (found,) = judge_runs([(one, printed)], load_results(tmp_path))
    assert printed.mean is not None
    assert found.effect == pytest.approx(printed.mean / 100)


def test_holm_counts_all_claims_that_are_judged_together(tmp_path: Path) -> None:
    write_run(tmp_path, "ours", [1.0] * 6 + [0.5] * 4)
    write_run(tmp_path, "theirs", [0.0] * 6 + [0.5] * 4)
    alone = verdict(tmp_path, claim())
    assert alone.verdict == "holds"
    assert alone.comparisons[0].adjusted == pytest.approx(alone.comparisons[0].p)
    rng = np.random.default_rng(0)
    weak = [float(score) for score in rng.normal(0.5, 0.2, 30).clip(0, 1)]
    better = [score + 0.03 + float(noise) for score, noise in zip(weak, rng.normal(0, 0.12, 30), strict=True)]
    write_run(tmp_path, "weak", weak)
    write_run(tmp_path, "better", better)
    one = claim(replace(TRIAL, pairs=(("better", "weak"),)))
    assert 0.001 < paired_difference(weak, better).p < 0.05
    assert verdict(tmp_path, one).verdict == "holds"
    asked_twice = judge_runs([(one, judge_print(one))] * 60, load_results(tmp_path))
    assert asked_twice[0].verdict == "holds", "one comparison, however many claims ask for it"
    crowd = [one, *(claim(replace(TRIAL, pairs=(("better", "weak"),), least=-i / 1e9)) for i in range(1, 60))]
    among = judge_runs([(each, judge_print(each)) for each in crowd], load_results(tmp_path))
    assert among[0].verdict == "cannot be told", "as one of sixty it may be chance"


def test_a_sure_gain_stays_sure_among_hundreds_of_others() -> None:
    rng = np.random.default_rng(0)
    theirs = rng.uniform(0.2, 0.6, 40)
    found = paired_difference(theirs.tolist(), (theirs + 0.2 + rng.normal(0, 0.1, 40)).tolist())
    assert found.p == pytest.approx(1 / 10_001), "as small as a bootstrap's can be"
    assert holm([Comparison("", found, 0.1, 0.0).p] * 600)[0] < 0.001


def test_every_task_is_a_comparison_of_its_own_or_one_with_its_sets_weighed_alike(tmp_path: Path) -> None:
    about = {"benchmark": ["longbench"] * 40, "subset": ["trec"] * 30 + ["qasper"] * 10}
    write_run(tmp_path, "ours", [1.0] * 30 + [0.0] * 10, **about)
    write_run(tmp_path, "theirs", [0.0] * 30 + [1.0] * 10, **about)
    apart = verdict(tmp_path, claim(replace(TRIAL, apart=True)))
    assert [(one.where.split()[-1], one.difference.mean, one.sign) for one in apart.comparisons] == [
        ("trec", 1.0, 1),
        ("qasper", -1.0, -1),
    ]
    assert apart.verdict == "fails"
    assert verdict(tmp_path, claim(replace(TRIAL, apart=True), "most")).verdict == "cannot be told"
    together = verdict(tmp_path, claim())
    assert together.comparisons[0].difference.mean == 0.0, "the mean of sets, where that over examples is .5"
    assert verdict(tmp_path, claim(says="average")).verdict == "cannot be told"


def test_a_gain_in_percent_has_to_pass_that_multiple_of_the_rival(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    theirs = rng.uniform(0.2, 0.4, size=40)
    write_run(tmp_path, "theirs", [float(x) for x in theirs])
    write_run(tmp_path, "ours", [float(x) for x in 1.5 * theirs + rng.normal(0, 0.01, 40)])
    for factor, expected in ((1.3, "holds"), (1.7, "fails")):
        assert verdict(tmp_path, claim(replace(TRIAL, factor=factor))).verdict == expected


def test_a_margin_is_kept_or_not(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    full = rng.uniform(0.3, 0.7, size=50)
    for name, loss in (("close", 0.005), ("far", 0.05)):
        write_run(tmp_path, name, [float(x) for x in full - loss + rng.normal(0, 0.005, size=50)])
    write_run(tmp_path, "full", [float(x) for x in full], schedule=None)
    for name, expected in (("close", "holds"), ("far", "fails")):
        trial = replace(TRIAL, pairs=((name, "full"),), least=-0.01)
        assert verdict(tmp_path, claim(trial)).verdict == expected, name


def test_runs_of_another_schedule_budget_or_prompt_are_no_pair(tmp_path: Path) -> None:
    write_run(tmp_path, "ours", [1.0] * 10)
    write_run(tmp_path, "theirs", [0.0] * 10, schedule=EVICTS)
    write_run(tmp_path, "theirs", [0.0] * 10, budget=128)
    found = verdict(tmp_path, claim())
    assert (found.verdict, found.comparisons) == ("no data", ())
    assert found.missing == "no such runs: python -m kvbench -m model=pocket task=niah policy=ours,theirs"


def test_a_failed_example_leaves_no_comparison(tmp_path: Path) -> None:
    write_run(tmp_path, "ours", [1.0] * 10)
    write_run(tmp_path, "theirs", [0.0] * 9 + [None])
    assert verdict(tmp_path, claim()).verdict == "no data"


def test_only_the_named_budgets_count(tmp_path: Path) -> None:
    for budget in (64, 128):
        write_run(tmp_path, "ours", [1.0] * 10, budget)
        write_run(tmp_path, "theirs", [0.0] * 10, budget)
    found = verdict(tmp_path, claim(replace(TRIAL, budgets=(128,))))
    assert [one.where for one in found.comparisons] == ["pocket, niah at 128: ours - theirs"]


def test_runs_of_a_smaller_model_count_at_their_own_budgets_where_asked(tmp_path: Path) -> None:
    write_run(tmp_path, "kvec", [1.0] * 20, 16)
    write_run(tmp_path, "snapkv", [0.0] * 20, 16)
    runs = load_results(tmp_path)
    own, anywhere = (
        {one.claim.name: one.measured for one in judge(["kvec"], runs, any_budget)} for any_budget in (False, True)
    )
    assert own["needle"] is not None
    assert anywhere["needle"] is not None
    assert (own["needle"].verdict, anywhere["needle"].verdict) == ("no data", "holds")


def test_a_gain_that_falls_is_compared_budget_by_budget(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    theirs = rng.uniform(0.2, 0.4, size=50)
    for budget, gain in ((64, 0.4), (128, 0.2), (256, 0.3)):
        write_run(tmp_path, "theirs", [float(x) for x in theirs], budget)
        write_run(tmp_path, "ours", [float(x) for x in theirs + gain + rng.normal(0, 0.02, 50)], budget)
    found = verdict(tmp_path, claim(replace(TRIAL, falling=True)))
    assert [round(one.difference.mean, 1) for one in found.comparisons] == [0.2, -0.1]
    assert [one.sign for one in found.comparisons] == [1, -1]
    assert found.verdict == "fails"


def test_of_given_texts_fewer_nats_are_better(tmp_path: Path) -> None:
    for policy, nll in (("ours", 2.0), ("theirs", 2.1)):
        folder = tmp_path / policy
        folder.mkdir()
        rng = np.random.default_rng(1)
        samples = []
        for i in range(12):
            one = nll + 0.5 * float(rng.uniform()) + (0.01 * i if policy == "theirs" else 0.0)
            likelihood = Likelihood(one, 99, [100], [one], None, [[64]])
            samples.append(Sample(i, f"{i:064d}", 100, [], likelihood=likelihood, kept_tokens=[[64]]))
        save(folder, samples, policy, 64, GROWS)
    found = verdict(tmp_path, claim())
    assert found.verdict == "holds"
    assert found.comparisons[0].difference.mean == pytest.approx(0.1 + 0.01 * 5.5)


def test_a_claim_that_runs_cannot_decide_says_what_can(tmp_path: Path) -> None:
    write_run(tmp_path, "ours", [1.0] * 5)
    assert verdict(tmp_path, claim(None)).missing == "not decided by runs: or this"


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
