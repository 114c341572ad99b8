"""Claims decided from runs on disk whose answer is known by hand."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import plotted_runs
import pytest
import yaml

from kvbench.claims import main
from kvbench.papers.claims import PAPERS, Claim, decide, read_claims
from kvbench.results.loading import load_results
from kvbench.results.samples import Likelihood, Sample

RUNS = {"model": "pocket", "task": "niah", "budget": 64, "schedule": "prompt", "decode": "evict"}
CLAIM = Claim("a", "ours is better", "here", {"h2o": "tova"}, RUNS)
RIGHT, WRONG, MIXED = [1.0] * 20, [0.0] * 20, [1.0, 0.0] * 10


def write(out: Path, policy: str, scores: Sequence[float | Sample], schedule: Any = None, **about: Any) -> None:
    parts = plotted_runs.described(policy)
    parts["schedule"] |= schedule or {}
    samples = [one if isinstance(one, Sample) else plotted_runs.sample(i, one) for i, one in enumerate(scores)]
    plotted_runs.write_run(out, policy, samples, **{"budget": 64, "parts": parts, **about})


def decided(out: Path, claim: Claim = CLAIM) -> str:
    return decide(claim, load_results(out)).verdict


@pytest.mark.parametrize(
    ("ours", "theirs", "fields", "verdict"),
    [
        (RIGHT, WRONG, {}, "holds"),
        (WRONG, RIGHT, {}, "fails"),
        (RIGHT, RIGHT, {}, "cannot be decided"),
        ([1.0] * 6 + [0.0] * 14, [0.0] * 16 + [1.0] * 4, {}, "cannot be decided"),  # six gained, four lost
        ([1.0] * 4, [0.0] * 4, {}, "cannot be decided"),  # fewer than five examples
        (RIGHT, MIXED, {"gain": 0.9}, "fails"),  # a gain of half a point
        (RIGHT, RIGHT, {"gain": -0.4}, "holds"),  # loses less than .4
    ],
)
def test_a_claim_is_decided_by_the_paired_interval(
    tmp_path: Path, ours: list[float], theirs: list[float], fields: dict[str, Any], verdict: str
) -> None:
    write(tmp_path, "h2o", ours)
    write(tmp_path, "tova", theirs)
    assert decided(tmp_path, replace(CLAIM, **fields)) == verdict


OTHER: list[dict[str, Any]] = [
    {"model": "llama"},
    {"task": "niah_multikey"},
    {"budget": 128},
    {"compress": "context"},
    {"schedule": {"decode": "grow"}},
    {"schedule": {"every": 8}},
    {"schedule": {"protect": "prompt"}},
]


@pytest.mark.parametrize("other", OTHER, ids=str)
def test_only_runs_with_the_fields_of_the_claim_decide_it(tmp_path: Path, other: dict[str, Any]) -> None:
    claim = replace(CLAIM, runs={**RUNS, "every": 1, "protect": "none"})
    plain = {"every": 1, "protect": "none"}
    for policy, scores in (("h2o", RIGHT), ("tova", WRONG)):
        write(tmp_path, policy, scores, **{**other, "schedule": {**plain, **other.get("schedule", {})}})
    assert decided(tmp_path, claim) == "no data"
    for policy, scores in (("h2o", WRONG), ("tova", RIGHT)):
        write(tmp_path, policy, scores, schedule=plain)
    assert decided(tmp_path, claim) == "fails"


def test_runs_of_another_setting_are_not_paired(tmp_path: Path) -> None:
    write(tmp_path, "h2o", RIGHT)
    write(tmp_path, "tova", WRONG, seed=1)
    assert decided(tmp_path) == "no data"


def test_the_answers_to_one_prompt_are_one_example(tmp_path: Path) -> None:
    """Nine answers each to one prompt: n is 1, which decides nothing."""
    for policy, score in (("h2o", 1.0), ("tova", 0.0)):
        answers = [replace(plotted_runs.sample(i, score), sample=i, prompt_hash="0" * 64) for i in range(9)]
        write(tmp_path, policy, answers)
    found = decide(CLAIM, load_results(tmp_path))
    assert (found.verdict, found.comparisons[0].difference.n) == ("cannot be decided", 1)


def text(index: int, nll: float, tokens: int) -> Sample:
    likelihood = Likelihood(nll, tokens, [tokens], [nll], 4, [[9, 8]])
    return replace(plotted_runs.sample(index, 1.0), score=None, output=None, references=[], likelihood=likelihood)


def test_nll_is_averaged_over_tokens_and_lower_is_better(tmp_path: Path) -> None:
    """Two long texts of 1,000 tokens are better by 1, eighteen of 10 worse by 1: (2000 - 180) / 2180 = .835."""
    lengths = [1000] * 2 + [10] * 18
    write(tmp_path, "h2o", [text(i, 1.0 if n == 1000 else 3.0, n) for i, n in enumerate(lengths)])
    write(tmp_path, "tova", [text(i, 2.0, n) for i, n in enumerate(lengths)])
    (found,) = decide(CLAIM, load_results(tmp_path)).comparisons
    assert found.difference.mean == pytest.approx(1820 / 2180)


def test_several_comparisons_are_corrected_and_all_must_hold_or_most(tmp_path: Path) -> None:
    """Six gained, none lost: McNemar's p is 2 / 2^6 = .031, times two comparisons .0625."""
    write(tmp_path, "h2o", [1.0] * 6 + [0.0] * 14)
    write(tmp_path, "tova", WRONG)
    assert decided(tmp_path) == "holds"
    both = replace(CLAIM, runs={**RUNS, "budget": [64, 128]})
    assert decided(tmp_path, both) == "cannot be decided"  # the runs at 128 are missing
    write(tmp_path, "h2o", [1.0] * 6 + [0.0] * 14, budget=128)
    write(tmp_path, "tova", WRONG, budget=128)
    found = decide(both, load_results(tmp_path))
    assert [one.p for one in found.comparisons] == pytest.approx([0.0625, 0.0625])
    three = replace(CLAIM, pairs={"h2o": ["tova", "cake", "roco"]})
    write(tmp_path, "cake", WRONG)
    write(tmp_path, "roco", [1.0] * 6 + [0.0] * 14)
    write(tmp_path, "h2o", [*RIGHT, 1.0])  # the longer run counts
    assert decided(tmp_path, three) == "holds"
    write(tmp_path, "roco", [*RIGHT, 1.0])
    assert decided(tmp_path, three) == "cannot be decided"
    assert decided(tmp_path, replace(three, most=True)) == "holds"


def test_the_claims_of_all_papers_can_be_read_and_have_names_of_their_own() -> None:
    claims = [claim for paper in PAPERS for claim in read_claims(paper)]
    assert len({claim.name for claim in claims}) == len(claims) == 57
    assert all([*claim.plans()] for claim in claims)


def test_the_command_prints_verdicts_of_a_file_with_overrides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "runs", "h2o", RIGHT)
    write(tmp_path / "runs", "tova", WRONG)
    claim = {"name": "a", "claim": "ours is better", "source": "here", "pairs": {"h2o": "tova"}}
    (tmp_path / "mine.yaml").write_text(
        yaml.safe_dump({"claims": [{**claim, "runs": {**RUNS, "budget": 512}}]}, sort_keys=False)
    )
    words = ["--paper", str(tmp_path / "mine.yaml"), "--runs", str(tmp_path / "runs")]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "no data" in said
    command = "kvbench -m policy=h2o,tova model=pocket task=niah budget=512 schedule=prompt decode=evict"
    assert command in " ".join(said.split())
    assert main([*words, "budget=64"]) == 0
    assert "holds" in capsys.readouterr().out
    assert main(["--paper", "nobody"]) == 2
    assert "paper=nobody does not exist (allowed: caote" in capsys.readouterr().err
