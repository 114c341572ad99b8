"""The table of the divergence from the full cache: `kvbench results collect --metric kl`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvbench.report.table import STAR, grouped, labelled, measure
from kvbench.report.text_table import NONE, TextTable
from kvbench.results.pairs import paired
from kvbench.results.result import Result
from kvbench.results.statistics import FEWEST, Difference, corrected, estimate

_LEGEND = (
    "KL: KL(full || policy) of the next token, nats per token of full's own answer, mean over examples; median, p90, "
    "p99, max: over tokens; same top: tokens with the same most likely next token; diverged: answers that greedy "
    "decoding under the policy would change (Wilson); first change: tokens before it, median, never if half of the "
    "answers have none; log p: of the fed token minus that under full"
)
_FLOOR = "KL of full: the rounding of this batch on this device, the floor of all others"


def divergence_table(rows: Sequence[Result]) -> TextTable:
    """One row per run with task.divergence=true."""
    rows = grouped(rows)
    columns = {title: [of(row) or NONE for row in rows] for title, of in _COLUMNS.items()}
    best = _against_best(rows)
    notes = [_LEGEND, *[_FLOOR] * any(row.is_full for row in rows)]
    if best:
        columns["vs best (95% CI)"] = [one.text(4, 4) if (one := best.get(row)) else NONE for row in rows]
        notes.append(f"vs best: KL minus the lowest one of the same task and budget, on the same examples, {STAR}")
    return labelled(rows, {k: v for k, v in columns.items() if set(v) != {NONE}}, notes)


def _against_best(rows: Sequence[Result]) -> dict[Result, Difference]:
    """The paired difference of every run from the run with the lowest KL of the same task, budget and schedule."""
    groups: dict[tuple[object, ...], list[Result]] = {}
    for row in rows:
        if row.value is not None and not row.is_full:
            groups.setdefault((*row.setting, row.task_label, row.budget, row.when), []).append(row)
    found: dict[Result, Difference] = {}
    for group in groups.values():
        best = min(group, key=lambda row: row.value or 0.0)
        pairs = {row: paired(best.outcomes, row.outcomes) for row in group if row is not best}
        found |= corrected({row: one.difference for row, one in pairs.items() if one and one.difference.n >= FEWEST})
    return found


def _text(name: str, how: str = ".3g", scale: float = 1, unit: str = "") -> Callable[[Result], str | None]:
    def text(row: Result) -> str | None:
        value = getattr(row, name)
        return None if value is None else f"{value * scale:{how}}{unit}"

    return text


def _diverged(row: Result) -> str | None:
    share = row.diverged_share
    return None if share is None else estimate(share, row.diverged_share_low, row.diverged_share_high, ".2f")


def _first(row: Result) -> str | None:
    if row.diverged_share is None:
        return None
    return "never" if row.first_divergence is None else f"{row.first_divergence:g}"


_COLUMNS: dict[str, Callable[[Result], str | None]] = {
    "KL (95% CI)": measure,
    "median": _text("kl_median"),
    "p90": _text("kl_p90"),
    "p99": _text("kl_p99"),
    "max": _text("kl_max"),
    "same top": _text("same_top", ".1f", 100, "%"),
    "diverged (95% CI)": _diverged,
    "first change": _first,
    "log p": _text("delta_logprob", "+.3g"),
    "tokens": _text("compared_tokens", ".0f"),
    "left out": _text("left_out", ".0f"),
    "kept/KV head": _text("kept_tokens", ".1f"),
    "cache MiB": _text("cache_bytes", ".3f", 2**-20),
}
