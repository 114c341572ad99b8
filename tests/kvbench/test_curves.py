"""Curves of score over size, against numbers worked by hand, and the tables of stored runs."""

import numpy as np
import pytest

import kvbench
from kvbench.errors import UsageError
from kvbench.report.curves import at_size_table, smallest_table
from kvbench.results.curves import Curve, difference_at, footprint, footprint_bytes, kept_share, smallest_size


def curve(sizes: list[float], scores: list[float], resamples: int = 4) -> Curve:
    resampled = np.tile(sizes, (resamples, 1)), np.tile(scores, (resamples, 1))
    return Curve(np.asarray(sizes), np.asarray(scores), resampled, n=20)


def test_a_difference_is_taken_at_the_size_of_the_policy_and_never_beyond_the_curve() -> None:
    rival = curve([0.1, 0.3, 0.5], [0.2, 0.6, 0.7])
    found = difference_at(curve([0.2], [0.5]), rival)
    assert found.mean == pytest.approx(0.5 - 0.4)  # halfway between .2 and .6
    assert difference_at(curve([0.05], [0.5]), rival) is None
    assert difference_at(curve([0.51], [0.5]), rival) is None


def test_a_resample_moves_size_and_score_together() -> None:
    """Examples that take more memory also score more: sizes .1 and .3, scores 0 and 1; the rival's line is the same."""
    drawn = np.asarray([[0.1], [0.2], [0.3]]), np.asarray([[0.0], [0.5], [1.0]])
    point = Curve(np.asarray([0.2]), np.asarray([0.5]), drawn, n=20)
    found = difference_at(point, curve([0.1, 0.3], [0.0, 1.0], resamples=3))
    assert (found.low, found.high) == pytest.approx((0, 0))


def test_the_smallest_size_is_the_crossing_of_the_line() -> None:
    full = curve([1.0], [1.0])
    found = smallest_size(curve([0.2, 0.4, 0.8], [0.5, 0.8, 1.0]), full)
    assert found[0] == pytest.approx(0.6)  # .9 is halfway between .8 and 1.0
    assert found[1].low == found[1].high == pytest.approx(0.6)
    assert smallest_size(curve([0.2, 0.4], [0.5, 0.89]), full) is None
    first = smallest_size(curve([0.2, 0.4], [0.95, 0.99]), full)
    assert first[0] == 0.2


def test_the_tables_of_runs() -> None:
    policies = [kvbench.make_policy("knorm", budget, decode="grow") for budget in (16, 64, 112)]
    policies += [
        kvbench.make_policy("threshold_knorm", tau=-3.0, decode="grow", matched=matched, **{"allocator.window": 16})
        for matched in ("none", "uniform")
    ]
    policies.append(kvbench.make_policy("full"))
    rows = kvbench.evaluate("pocket", policies=policies, tasks="niah", limit=6, lengths=[128])
    by_threshold = next(row for row in rows if row.budget is None and row.evicts)
    shares = [kept_share(sample) for sample in by_threshold.samples]
    frame = at_size_table(rows).frame
    assert [*frame["rival"]] == ["knorm", "matched=uniform"]
    control = next(row for row in rows if row.identity["policy"].get("allocator", {}).get("matched") == "uniform")
    assert float(frame["at this size"][1]) == pytest.approx(control.score, abs=1e-3)
    assert float(frame["kept (95% CI)"][0].split()[0]) == pytest.approx(np.mean(shares), abs=1e-3)
    low, high = (float(x) for x in frame["5-95%"][0].split("-"))
    assert low <= np.mean(shares) <= high
    smallest = smallest_table(rows).frame
    assert [*smallest["policy"]] == ["knorm"]
    sample = rows[0].samples[0]
    entries, size = footprint(sample), footprint_bytes(sample)
    assert size == pytest.approx(entries, rel=0.1)  # float32 keys and values of one size, with positions on both sides
    with pytest.raises(UsageError, match="sets its size itself"):
        at_size_table([row for row in rows if row.budget is not None])
    with pytest.raises(UsageError, match="policy=full"):
        smallest_table([row for row in rows if row.evicts])
