"""The table of the evidence that policies keep: `kvbench results collect --metric evidence`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvbench.report.table import grouped, labelled, measure
from kvbench.report.text_table import NONE, TextTable
from kvbench.results.result import Result
from kvbench.results.statistics import estimate

_LEGEND = (
    "evidence: share of its tokens that is held when the answer begins, mean over layers, KV heads and examples; of "
    "prompt: of all prompt tokens; lift: evidence / of prompt; distractors: of the other needles; at the end: of the "
    "evidence after the last token; heads whole: KV heads that hold all of the evidence; evicted: wrong answers whose "
    "evidence no head holds as a whole; missed: wrong answers with a head that does; right - wrong: evidence of right "
    "answers minus that of wrong ones"
)


def has_evidence(row: Result) -> bool:
    """Whether the task of a run knows where the evidence is, and the run recorded what it kept of it."""
    return row.kept_evidence is not None


def evidence_table(rows: Sequence[Result]) -> TextTable:
    """One row per run whose task knows where the evidence is."""
    rows = grouped(rows)
    columns = {title: [of(row) or NONE for row in rows] for title, of in _COLUMNS.items()}
    return labelled(rows, {k: v for k, v in columns.items() if set(v) != {NONE}}, [_LEGEND])


def _text(name: str, how: str = ".3f", ends: bool = False) -> Callable[[Result], str | None]:
    def text(row: Result) -> str | None:
        value = getattr(row, name)
        low, high = (getattr(row, f"{name}_{end}") for end in ("low", "high")) if ends else (None, None)
        return None if value is None else estimate(value, low, high, how)

    return text


_COLUMNS: dict[str, Callable[[Result], str | None]] = {
    "score (95% CI)": lambda row: measure(row) if row.measure == "score" else None,
    "KL (95% CI)": lambda row: measure(row) if row.measure == "KL" else None,
    "evidence (95% CI)": _text("kept_evidence", ends=True),
    "of prompt": _text("kept_prompt"),
    "lift (95% CI)": _text("evidence_lift", ".2f", ends=True),
    "distractors": _text("kept_distractors"),
    "at the end": _text("kept_evidence_end"),
    "heads whole": _text("heads_whole"),
    "right": _text("evidence_right", ".2f"),
    "missed": _text("evidence_missed", ".2f"),
    "evicted": _text("evidence_evicted", ".2f"),
    "right - wrong": _text("evidence_right_minus_wrong", "+.3f", ends=True),
}
