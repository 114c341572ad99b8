"""Tables of curves of score over size: `kvbench results collect --at-size` and `--smallest`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvbench.errors import UsageError
from kvbench.report.text_table import NONE, TextTable, table_of
from kvbench.results.curves import (
    Size,
    curves_of,
    difference_at,
    footprint,
    footprint_bytes,
    kept_share,
    smallest_size,
)
from kvbench.results.pairs import paired
from kvbench.results.result import Result
from kvbench.results.statistics import FEWEST, between, estimate, mean_interval

NAMES = ("model", "task", "policy")
AT_SIZE = (*NAMES, "kept (95% CI)", "5-95%", "most held", "score", "rival", "at this size", "difference (95% CI)")
SMALLEST = (*NAMES, "budgets", "footprint (95% CI)", "in bytes (95% CI)")
SHARE = 0.9


def at_size_table(rows: Sequence[Result]) -> TextTable:
    """Every run without a budget beside the curves of policies with budgets. UsageError without one."""
    cells = []
    for row in rows:
        if not row.evicts or row.budget is not None or row.score is None or _matched(row) not in (None, "none"):
            continue
        sizes = [share for sample in row.samples if (share := kept_share(sample)) is not None]
        if not sizes:
            continue
        interval = mean_interval(sizes)
        low, high = np.quantile(sizes, (0.05, 0.95))
        most = max(sum(map(sum, sample.kept_tokens)) for sample in row.samples if sample.kept_tokens)
        own = [row.model, row.task, row.name or row.policy]
        own.append(estimate(float(np.mean(sizes)), interval.low, interval.high))
        own += [between(low, high), f"{most:,}", f"{row.score:.3f}"]
        rivals = [(name, runs) for name, runs in _with_budgets(rows, row).items() if len(runs) > 1]
        lines = [[name, *_rival(row, runs)] for name, runs in rivals]
        lines += [[f"matched={kind}", *_control(row, run)] for kind, run in _controls(rows, row)]
        cells += [[*own, *line] for line in lines] or [[*own, NONE, NONE, NONE]]
    if not cells:
        raise UsageError("--at-size is for runs whose policy sets its size itself, such as kvzap: there is none")
    note = (
        "kept: tokens held at the end, share of all, mean over examples; most held: entries of all layers and heads; "
        "at this size: the rival's score, interpolated between its budgets, none outside of them; difference: examples "
        "are resampled once for sizes and scores, *: p is at most 0.05; matched: as many tokens of each example, "
        "as equal budgets of all heads (uniform) or as the best of all heads (global)"
    )
    return table_of(AT_SIZE, cells, "policies without a budget", left=(*NAMES, "rival"), notes=(note,))


def _with_budgets(rows: Sequence[Result], like: Result) -> dict[str, list[Result]]:
    """The runs with a budget, by policy, in the same setting."""
    found: dict[str, list[Result]] = {}
    for row in rows:
        alike = (row.setting, row.compress) == (like.setting, like.compress)
        if alike and row.evicts and row.budget is not None and row.score is not None:
            found.setdefault(row.name or row.policy, []).append(row)
    return found


def _matched(row: Result) -> str | None:
    """The control that a run of a threshold is: none, uniform or global; None for other policies."""
    return (row.identity["policy"].get("allocator") or {}).get("matched")


def _controls(rows: Sequence[Result], like: Result) -> list[tuple[str, Result]]:
    """The controls of a run without a budget, by kind: same scores, same threshold, same setting."""

    def kind(row: Result) -> tuple[object, ...]:
        policy: Mapping[str, Any] = row.identity["policy"]
        own = {name: x for name, x in policy["allocator"].items() if name not in ("class", "matched")}
        return row.setting, row.compress, policy["scorer"], own

    found = ((_matched(row), row) for row in rows if row.evicts and row.score is not None)
    return [(name, row) for name, row in found if name not in (None, "none") and kind(row) == kind(like)]


def _control(row: Result, control: Result) -> list[str]:
    pair = paired(control.outcomes, row.outcomes)
    if pair is None or pair.difference.n < FEWEST:
        return [f"{control.score:.3f}", NONE]
    return [f"{control.score:.3f}", pair.difference.text().rstrip()]


def _rival(row: Result, runs: Sequence[Result]) -> list[str]:
    curves = curves_of([[row], runs], kept_share)
    difference = None if curves is None else difference_at(*curves)
    if curves is None or difference is None:
        return [NONE, NONE]
    return [f"{curves[0].scores[0] - difference.mean:.3f}", difference.text().rstrip()]


def smallest_table(rows: Sequence[Result]) -> TextTable:
    """The smallest KV footprint at which every policy with several budgets has 90% of the full cache's score."""
    cells = []
    for full in (row for row in rows if not row.evicts and row.policy == "full" and row.score):
        for name, runs in _with_budgets(rows, full).items():
            if len(runs) > 1:
                budgets = f"{len(runs)}"
                sizes = [_smallest(full, runs, size) for size in (footprint, footprint_bytes)]
                cells.append([full.model, full.task, name, budgets, *sizes])
    if not cells:
        raise UsageError("--smallest needs the run policy=full, and a policy at two budgets or more, on the same task")
    note = (
        f"footprint: the smallest KV footprint with {SHARE:.0%} of full's score, interpolated between budgets; -: not "
        "reached; <=: reached at the smallest budget; in bytes: an entry counts its bytes"
    )
    return table_of(SMALLEST, cells, f"smallest footprint with {SHARE:.0%} of full", left=NAMES, notes=(note,))


def _smallest(full: Result, runs: Sequence[Result], size: Size) -> str:
    curves = curves_of([[full], runs], size)
    found = None if curves is None else smallest_size(curves[1], curves[0], SHARE)
    if curves is None or found is None:
        return NONE
    smallest, interval = found
    mark = "<= " if smallest == curves[1].sizes[0] else ""
    return mark + estimate(smallest, interval.low, interval.high).replace("-inf)", "-never)")
