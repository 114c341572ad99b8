"""Intervals of the averages that benchmarks print over their subsets."""

from pathlib import Path

import pytest

from kvbench.results.metrics import average_intervals, metrics
from kvbench.results.samples import Sample
from kvbench.tasks.longbench.subsets import PAPER_SETS
from kvbench.tasks.trust import trust


def answer(index: int, score: float | None, benchmark: str = "longbench", **metadata: str) -> Sample:
    return Sample(index, f"{index:064d}", 100, ["x"], {"benchmark": benchmark, **metadata}, output="x", score=score)


def suite(names: tuple[str, ...], scores: list[float]) -> list[Sample]:
    rows = [(name, score) for name in names for score in scores]
    return [answer(i, score, subset=name) for i, (name, score) in enumerate(rows)]


def test_every_average_over_subsets_that_longbench_prints_has_its_interval() -> None:
    samples = suite((*PAPER_SETS, "lsht"), [0.2, 0.4, 0.9, 0.1])
    got = metrics(samples)
    averages = {name for name in got["official"] if not name.startswith("subset=")}
    assert set(got["official_intervals"]) == averages == {
        "average", "average 16", "category=single-document QA", "category=multi-document QA", "category=summarization",
        "category=few-shot", "category=synthetic", "category=code",
    }  # fmt: skip
    for name, (low, high) in got["official_intervals"].items():
        assert got["official"][name] == pytest.approx(40.0), name
        assert low < 40.0 < high, name
    wide, narrow = (got["official_intervals"][name] for name in ("category=code", "average 16"))
    assert wide[1] - wide[0] > 2 * (narrow[1] - narrow[0]), "2 sets instead of 16: sqrt(8) times as wide"


def test_a_custom_benchmark_names_the_subsets_of_its_averages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_averages.py").write_text(
        'SUBSETS_BY = "topic"\ndef averages(subsets): return {"sciences": [s for s in subsets if s != "art"]}\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    trust(["own_averages"])
    rows = [(topic, score) for topic in ("art", "physics", "biology") for score in (0.2, 0.4, 0.9)]
    samples = [answer(i, score, "own_averages", topic=topic) for i, (topic, score) in enumerate(rows)]
    ((name, (low, high)),) = average_intervals(samples).items()
    assert (name, low < 50.0 < high) == ("sciences", True)
    assert metrics(samples)["official"] == {}
