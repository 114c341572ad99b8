"""What a policy changes against full: the worked example, graded scores, lengths, old samples, and its table."""

from dataclasses import replace
from pathlib import Path

import pytest
from plotted_runs import sample, write_run

from kvbench.results.__main__ import main
from kvbench.results.changes import Changes
from kvbench.results.changes import changes as of_outcomes
from kvbench.results.columns import frame
from kvbench.results.loading import load_results
from kvbench.results.samples import Sample
from kvbench.results.summary import outcomes_of


def changes(full: list[Sample], samples: list[Sample]) -> Changes | None:
    return of_outcomes(outcomes_of(full), outcomes_of(samples))


def answers(scores: list[float], lengths: list[int] | None = None, limit: int = 10) -> list[Sample]:
    lengths = lengths or [4] * len(scores)
    return [
        replace(sample(i, score), generated_tokens=n, decode_steps=min(n, limit - 1), max_new_tokens=limit)
        for i, (score, n) in enumerate(zip(scores, lengths, strict=True))
    ]


def test_the_worked_example_of_200_right_or_wrong_answers() -> None:
    full = [1.0] * 138 + [0.0] * 62
    policy = [0.0] * 18 + [1.0] * 120 + [1.0] * 6 + [0.0] * 56
    found = changes(answers(full), answers(policy))
    shown = {
        name: [round(number, 3) for number in (share.mean, share.low, share.high)]
        for name in ("lost", "gained", "lost_of_right")
        if (share := getattr(found, name))
    }
    assert shown == {
        "lost": [0.090, 0.058, 0.138],
        "gained": [0.030, 0.014, 0.064],
        "lost_of_right": [0.130, 0.084, 0.197],
    }
    assert found.flips == pytest.approx(24 / 200)


def test_graded_scores_lose_and_gain_separately_and_flip_nothing() -> None:
    found = changes(answers([0.5, 0.5, 0.5, 0.8, 0.2]), answers([0.1, 0.9, 0.5, 0.8, 0.2]))
    assert (found.lost and found.lost.mean, found.gained and found.gained.mean) == (pytest.approx(0.08),) * 2
    assert found.flips is found.lost_of_right is None


def test_lengths_count_the_stop_token_and_answers_that_were_cut_off() -> None:
    full, policy = answers([1.0] * 5, [3, 3, 3, 3, 3]), answers([1.0] * 5, [10, 10, 3, 3, 3])
    found = changes(full, policy)
    assert found.length.mean == pytest.approx((6 + 6) / 5)  # 10 tokens without a stop token, 3 tokens with one
    assert found.length_ratio == pytest.approx((10 + 10 + 4 * 3) / (4 * 5))
    assert (found.cut and found.cut.mean, found.cut and found.cut.method) == (pytest.approx(0.4), "tango")
    stopped = [replace(one, finish_reason="stop") for one in policy]  # a stop text in the last token allowed
    again = changes(full, stopped)
    assert again.cut.mean == 0


def test_nothing_is_said_about_few_or_failed_examples() -> None:
    assert changes(answers([1.0] * 4), answers([1.0] * 4)) is None
    assert changes(answers([1.0] * 6), [*answers([1.0] * 5), replace(sample(5, None), error="x")]) is None
    unknown = changes(answers([1.0] * 5), [replace(one, decode_steps=None) for one in answers([0.0] * 5)])
    assert unknown.length is None


def test_the_table_compares_with_full_and_names_missing_fields_of_old_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, "tova", answers([0.0, 1.0, 1.0, 1.0, 1.0]))
    assert main(["collect", str(tmp_path), "--changes"]) != 0
    assert "no run shares 5" in capsys.readouterr().err
    write_run(tmp_path, "full", answers([1.0] * 5))
    for file in ("t.tex", "t.md"):
        assert main(["collect", str(tmp_path), "--changes", "-o", str(tmp_path / file)]) == 0
    assert "0.200 (0.036-0.624)" in (tmp_path / "t.md").read_text()
    assert "not in the samples of older runs" in (tmp_path / "t.tex").read_text()
    table = frame(load_results(tmp_path))
    assert table["lost"].tolist()[-1] == pytest.approx(0.2)
    assert table["kv_footprint"].isna().all()
    assert main(["collect", str(tmp_path), "--changes", "-o", str(tmp_path / "t.csv")]) != 0
