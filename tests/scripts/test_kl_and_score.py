"""Rank correlation of KL and score over policies: worked examples, and the interval over examples."""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import kl_and_score  # noqa: E402 - found in scripts


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kl_and_score, "RESAMPLES", 300)


def test_a_score_that_falls_with_every_kl_has_a_correlation_of_minus_one() -> None:
    kl = [np.full(6, 0.1 * i) for i in range(5)]
    scores = [np.full(4, 1 - 0.2 * i) for i in range(5)]
    assert kl_and_score.correlation(kl, scores) == pytest.approx((-1, -1, -1))
    swapped = [scores[1], scores[0], *scores[2:]]
    assert kl_and_score.correlation(kl, swapped)[0] == pytest.approx(-0.9)  # 1 - 6 sum d^2 / (n (n^2 - 1))


def test_few_policies_and_equal_scores_have_none() -> None:
    kl = [np.full(6, 0.1 * i) for i in range(5)]
    assert kl_and_score.correlation(kl, [np.zeros(4)] * 5) == (None, None, None)
    assert kl_and_score.correlation(kl[:4], [np.full(4, 0.1 * i) for i in range(4)]) == (None, None, None)


def test_the_interval_is_wide_where_examples_disagree() -> None:
    rng = np.random.default_rng(1)
    kl = [rng.uniform(0, 1, 20) + 0.02 * i for i in range(8)]
    scores = [(rng.uniform(0, 1, 25) > 0.5 + 0.02 * i).astype(float) for i in range(8)]
    _, low, high = kl_and_score.correlation(kl, scores)
    assert high - low > 0.8
    clear = [rng.uniform(0, 0.1, 20) + i for i in range(8)], [np.full(25, 1 - i / 8) for i in range(8)]
    assert kl_and_score.correlation(*clear) == pytest.approx((-1, -1, -1))


def test_policies_are_joined_with_the_scores_of_the_largest_table_if_they_have_any() -> None:
    about = {"task": "niah", "budget": 64.0}
    kl = pd.DataFrame([{**about, "policy": p, "kl": 0.1} for p in ("full", "h2o", "tova", "h2o")])
    kl.loc[len(kl)] = ["niah", 64.0, "knorm", np.inf]
    scores = [{**about, "policy": "h2o", "table": table, "score": 1.0} for table in ("a", "b", "b")]
    rows = kl_and_score.joined(kl, pd.DataFrame([*scores, {**scores[0], "policy": "knorm"}]))
    table = kl_and_score.means(rows).set_index("policy")
    assert table["n_kl"].to_dict() == {"h2o": 2, "tova": 1}
    assert table.loc["h2o", ["table", "n_score", "score"]].tolist() == ["b", 2, 1.0]
    assert table.loc["tova", ["table", "n_score", "score"]].isna().all(), "it has no scores"


def test_new_examples_replace_those_of_the_same_number_only() -> None:
    about = {"task": "niah", "budget": np.nan, "policy": "full"}
    known = pd.DataFrame([{**about, "example": n, "kl": 0.5} for n in (0, 1)])
    new = pd.DataFrame([{**about, "example": n, "kl": 0.25} for n in (2, 1)])
    assert kl_and_score.taken_up(known, new)["kl"].tolist() == [0.5, 0.25, 0.25]
    assert kl_and_score.taken_up(known.head(0), new)["example"].tolist() == [1, 2]
