"""The price of a constraint: token sets that a serving engine can evict, compared with free ones of the same scorer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvbench.errors import UsageError
from kvbench.report.text_table import TextTable, table_of
from kvbench.results.pairs import paired
from kvbench.results.result import Result
from kvbench.results.statistics import FEWEST, Difference, corrected

NAMES = ("model", "task", "policy")
COLUMNS = (*NAMES, "budget", "unit", "heads", "free", "kept", "MiB", "score", "own", "price (95% CI)")
NOTE = (
    "price: score with own token sets minus the score with this set, same scorer and examples, *: p <= 0.05 "
    "with Holm's correction over the rows; kept: tokens per KV head; MiB: cache, whole pages"
)


def price_table(rows: Sequence[Result]) -> TextTable:
    """Every run with the selection `Pages` beside the run with own token sets. UsageError if there is no pair."""
    free = {_kind(row): row for row in rows if row.evicts and _constraint(row) == ("token", "own")}
    constrained = [(row, free[_kind(row)]) for row in rows if _constraint(row) and _kind(row) in free]
    pairs = {row: paired(row.outcomes, own.outcomes) for row, own in constrained if None not in (row.score, own.score)}
    prices = corrected({row: pair.difference for row, pair in pairs.items() if pair})
    cells = [_cells(row, own, prices[row]) for row, own in constrained if row in prices and row is not own]
    if not cells:
        raise UsageError(
            "no run with the prefix paged_ has a run of the same scorer, task and budget with own token sets beside "
            "it: run both, for example with experiment=engines"
        )
    return table_of(COLUMNS, cells, "price of the constraint", left=NAMES, notes=(NOTE,))


def _constraint(row: Result) -> tuple[str, ...]:
    """Unit and heads of the sets that a run keeps: ("token", "own") without a constraint; () for other selections."""
    chosen = row.identity["policy"].get("selection")
    if chosen is None:
        return "token", "own"
    return (chosen["unit"], chosen["heads"]) if "unit" in chosen else ()


def _kind(row: Result) -> str:
    """What a run shares with the run that it is compared with: all but selection, store and the budget's division."""
    policy: Mapping[str, Any] = row.identity["policy"]
    allocator = policy.get("allocator") or {}
    base = allocator.get("base", allocator) if "WholePages" in str(allocator) else allocator
    uniform = "uniform" in str(base) or "OneSet" in str(base)
    decode = (policy.get("schedule") or {}).get("decode")
    parts = policy.get("scorer"), policy.get("value"), decode, None if uniform else base
    return json.dumps([row.setting, row.compress, row.budget, parts], sort_keys=True)


def _cells(row: Result, own: Result, price: Difference) -> list[str]:
    written = price.text().rstrip() if price.n >= FEWEST else f"{price.mean:+.3f}"
    unit, heads = _constraint(row)
    store = row.identity["policy"].get("store") or {}
    sizes = [f"{row.kept_tokens:.1f}" if row.kept_tokens is not None else "-"]
    sizes.append(f"{row.cache_bytes / 2**20:.3f}" if row.cache_bytes is not None else "-")
    numbers = [*sizes, f"{row.score:.3f}", f"{own.score:.3f}", written]
    return [row.model, row.task, row.policy, str(row.budget), unit, heads, str(store.get("free", "-")), *numbers]
