"""The table of what every policy changes against the full cache: `kvbench results collect --changes`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvbench.errors import UsageError
from kvbench.report.table import labelled
from kvbench.report.text_table import NONE, TextTable
from kvbench.results.changes import Changes, Share
from kvbench.results.result import Result
from kvbench.results.statistics import FEWEST, Difference, corrected, estimate

_LEGEND = (
    "lost, gained: answers that only full, and only this policy, gets right (graded scores: what they lose and gain); "
    "net: gained - lost, *: p (Holm) <= 0.05; p: McNemar or bootstrap; p (Holm): corrected for the rows; length: "
    "tokens of the answers, EOS included, minus those of full; cut off: answers that reached max_new_tokens; "
    "looping: answers that end in a loop; KV footprint: entries held, summed over all fed tokens and pre-passes, as a "
    "share of the full cache's"
)


def changes_table(rows: Sequence[Result]) -> TextTable:
    """One row per run with at least 5 examples shared with its `full` run. Raises UsageError if there is none."""
    found = [(row, row.changes) for row in rows if row.changes is not None]
    compared = [row for row, _ in found]
    if not found:
        raise UsageError(
            f"--changes compares with policy=full on the same examples, but no run shares {FEWEST} with one"
        )
    nets = corrected({row: row.vs_full for row in compared if row.vs_full})
    columns = {
        title: [of(row, changes, nets.get(row)) or NONE for row, changes in found] for title, of in _COLUMNS.items()
    }
    notes = [_LEGEND]
    if any(row.kv_footprint is None for row in compared):
        notes.append("KV footprint: not in the samples of older runs (run them again in a new folder to have it)")
    return labelled(compared, {k: v for k, v in columns.items() if set(v) != {NONE}}, notes)


def _share(share: Share | None) -> str | None:
    return None if share is None else estimate(share.mean, share.low, share.high)


def _difference(one: Difference | None, digits: int) -> str | None:
    return None if one is None else one.text(digits, digits)


def _mean(mean: float | None, low: float | None, high: float | None) -> str | None:
    return None if mean is None or low is None or high is None else _share(Share(mean, low, high))


def _ratio(ratio: float | None) -> str | None:
    return None if ratio is None else f"{ratio:.2f}"


def _p(one: Difference | None) -> str | None:
    return None if one is None else f"{one.p:.4f}"


# net: the difference in score, with p corrected for the rows of the table
_COLUMNS: dict[str, Callable[[Result, Changes, Difference | None], str | None]] = {
    "lost (95% CI)": lambda row, changes, net: _share(changes.lost),
    "gained": lambda row, changes, net: _share(changes.gained),
    "lost of right": lambda row, changes, net: _share(changes.lost_of_right),
    "net": lambda row, changes, net: _difference(net, 3),
    "p": lambda row, changes, net: _p(row.vs_full),
    "p (Holm)": lambda row, changes, net: _p(net),
    "length": lambda row, changes, net: _difference(changes.length, 1),
    "ratio": lambda row, changes, net: _ratio(changes.length_ratio),
    "cut off": lambda row, changes, net: _mean(row.cut_share, row.cut_share_low, row.cut_share_high),
    "cut vs full": lambda row, changes, net: _difference(changes.cut, 3),
    "looping": lambda row, changes, net: _mean(row.looping_share, row.looping_share_low, row.looping_share_high),
    "looping vs full": lambda row, changes, net: _difference(changes.looping, 3),
    "KV footprint": lambda row, changes, net: _mean(row.kv_footprint, row.kv_footprint_low, row.kv_footprint_high),
}
