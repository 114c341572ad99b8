"""Tables for people: one row per run, or pivoted with one column per budget or task."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import NamedTuple

import pandas as pd

from kvbench.errors import UsageError
from kvbench.report.text_table import NONE, TextTable, frame_of, text
from kvbench.results.columns import frame as tidy
from kvbench.results.labels import budget_order, in_words, text_of
from kvbench.results.result import FINISHED, Result, Results
from kvbench.results.statistics import FEWEST, Difference, corrected, estimate
from kvbench.terminal.command import terminal_width

AGAINST = "vs full (95% CI)"
STAR = "*: p <= 0.05 with Holm's correction over the rows"
LONG_ANSWER = 256  # from this mean number of generated tokens on, the length of answers is a column
MIB = 2**-20
RIGHT = ("budget", "n")
GROUPS = ("model", "task", "schedule", "decode")


def measure(row: Result) -> str:
    """The score, NLL or KL of a run with its 95% interval."""
    if row.value is None:
        return f"infinite: {row.kl_infinite:.0f} tokens" if row.kl_infinite else f"none: {row.n_failed} failed"
    specs = (".3g", ".2g") if row.measure == "KL" else (".4f", ".3f") if row.reads else (".3f", ".2f")
    low, high = row.ends or (None, None)
    return estimate(row.value, low, high, *specs)


def against(row: Result, difference: Difference | None) -> str | None:
    """Mean difference from the baseline on shared examples; "*" if its corrected p is significant."""
    digits = 4 if row.reads else 3
    if difference is None:
        return f"{row.gap.nll:+.4f} " if row.gap else None
    return difference.text(digits, digits - 1)


def _share(row: Result) -> str | None:
    share = row.cache_share
    return None if share is None else f"{100 * share:.{0 if share > 0.9995 else 1}f}%"


class _Column(NamedTuple):
    """A column of numbers, shown if some row has a value and `shown(row)` is true.

    value: a field of a result, with its format, factor and unit, or a function that returns text. instead: the field
    that is used if the first has no value. legend: the column's text in the footer.
    """

    title: str
    value: str | Callable[[Result], str | None]
    how: str = ""
    scale: float = 1
    unit: str = ""
    instead: str = ""
    legend: str = ""
    shown: Callable[[Result], bool] = lambda _: True

    def text(self, row: Result) -> str | None:
        """The text of a row; None without a value."""
        if not isinstance(self.value, str):
            return self.value(row)
        if row.n_shared and ("seconds" in self.value or "_ms_" in self.value):
            return "shared"
        number = getattr(row, self.value)
        number = getattr(row, self.instead) if number is None and self.instead else number
        return None if number is None else f"{number * self.scale:{self.how}}{self.unit}"


def _is_long(row: Result) -> bool:
    return (row.generated_tokens or 0) >= LONG_ANSWER


def _reads_part(row: Result) -> bool:
    return row.read_tokens is not None


_COLUMNS = (
    _Column("scored tokens", "scored_tokens", "d"),
    _Column("score (95% CI)", measure, legend="score: mean, 1 is best", shown=lambda row: row.measure == "score"),
    _Column("NLL (95% CI)", measure, legend="NLL: nats per token, lower is better", shown=lambda row: row.reads),
    _Column(
        "KL (95% CI)", measure, legend="KL: from full, nats per token of the same answer, 0 is best",
        shown=lambda row: row.measure == "KL",
    ),
    _Column("KL p99", "kl_p99", ".3g", legend="KL p99, max: over tokens"),
    _Column("KL max", "kl_max", ".3g"),
    _Column("same top", "same_top", ".1f", 100, "%", legend="same top: tokens with the same most likely next token"),
    _Column("diverged", "diverged_share", ".0f", 100, "%", legend="diverged: greedy answers that would differ"),
    _Column(
        AGAINST, lambda row: against(row, row.difference), legend=f"vs full: on the same examples; {STAR}",
        shown=lambda row: row.difference is not None or row.gap is not None,
    ),
    _Column("seeds", "n_seeds", "d"),
    _Column("SD", "seed_sd", ".3f", legend="SD: standard deviation of the seeds' means"),
    _Column("PPL", "perplexity", ".4g"),
    _Column("PPL vs full", lambda row: None if row.gap is None else f"{row.gap.perplexity:+.4g}"),
    _Column("pass@k", "pass_at_k", ".3f", legend="pass@k: share of prompts with a right answer among k"),
    _Column("tokens", "generated_tokens", ".0f", legend="tokens: mean generated tokens", shown=_is_long),
    _Column(
        "cut off", "cut_share", ".1f", 100, "%", legend="cut off: answers that reached max_new_tokens", shown=_is_long
    ),
    _Column(
        "looping", "looping_share", ".1f", 100, "%", legend="looping: answers that end in a loop", shown=_is_long
    ),
    _Column(
        "in thought", "in_thought", ".0f", legend="in thought: answers cut off inside a thought, scored as empty"
    ),
    _Column(
        "clipped", "clipped", ".0f", legend="clipped: numbers of keys and values beyond the store's fixed scales",
        shown=lambda row: bool(row.clipped),
    ),
    _Column("kept/KV head", "kept_tokens", ".1f", legend="kept, cache: held after the last token"),
    _Column(
        "read/KV head", "read_tokens", ".1f", instead="kept_tokens", shown=_reads_part,
        legend="read: by the last decoded token; the budget limits the tokens it reads",
    ),
    _Column("if freed", "unmasked_tokens", ".1f", legend="if freed: kept without masked tokens, which are held"),
    _Column("most kept", lambda row: str(max(map(max, row.max_kept_tokens))) if row.max_kept_tokens else None),
    _Column("cache MiB", "cache_bytes", ".3f", MIB),
    _Column("MiB read/token", "read_bytes", ".3f", MIB, instead="cache_bytes", shown=_reads_part),
    _Column("of full", _share),
    _Column("spare MiB", "spare_bytes", ".3f", MIB, legend="spare: reserved but unused"),
    _Column("peak MiB", "peak_bytes", ".3f", MIB),
    _Column("state MiB", "state_bytes", ".3f", MIB, legend="state: states of recurrent layers"),
    _Column("device peak MiB", "device_peak_bytes", ".0f", MIB),
    _Column("pre-pass tokens", "pre_pass_tokens", ".1f"),
    _Column("pre-pass steps", "pre_pass_steps", ".1f"),
    _Column("bits/number", "bits_per_number", ".2f"),
    _Column("16-bit/this", "ratio_to_16_bit", ".2f", 1, "x", legend="16-bit/this: full 16-bit cache / this cache"),
    _Column("prefill s", "prefill_seconds", ".3f", shown=lambda row: row.prefill_seconds is not None),
    _Column("decode s", "decode_seconds", ".3f", shown=lambda row: row.decode_seconds is not None),
    _Column("ms/token", "decode_ms_per_token", ".2f", shown=lambda row: row.decode_ms_per_token is not None),
)  # fmt: skip


def print_table(rows: Iterable[Result]) -> None:
    """Print one row per run, in the given order; columns are folded in a narrow terminal."""
    found = Results(rows, in_order=False)
    sys.stdout.write(text(results_table(found), terminal_width()))
    if len(found) == 1:
        sys.stdout.write(f"results: {found[0].folder}\n")


def results_table(rows: Sequence[Result]) -> TextTable:
    """One row per result. Values that all rows share are in the title, values that differ are columns.

    Rows are grouped by model, task and schedule; rows without eviction are first.
    """
    rows = grouped(rows)
    watched = dict.fromkeys(name for row in rows for name in row.watched)
    columns = *_COLUMNS, *(_Column(name, partial(_watched, name)) for name in watched)
    shown = [one for one in columns if any(one.shown(row) and one.text(row) is not None for row in rows)]
    numbers = {one.title: [one.text(row) or NONE for row in rows] for one in shown}
    if AGAINST in numbers:
        differences = corrected({row: row.difference for row in rows if row.difference})
        numbers[AGAINST] = [against(row, differences.get(row)) or NONE for row in rows]
    table = labelled(rows, numbers, [one.legend for one in shown if one.legend])
    times = "Times are not shown for batched runs. Use engine.rows=1 to time each run alone."
    return replace(table, notes=[*table.notes, *[times] * any(row.n_shared for row in rows)])


def _watched(name: str, row: Result) -> str | None:
    value = row.watched.get(name)
    return None if value is None else f"{value:.4g}"


def labelled(rows: Sequence[Result], columns: Mapping[str, Sequence[str]], legend: Sequence[str]) -> TextTable:
    """A table of these columns, after the columns of text in which the rows differ."""
    words = _words(rows)
    named = _named_columns(words, always=("policy", "budget") if len(rows) == 1 else ("policy",))
    legend = [*legend, *["budget: tokens per KV head (below 1: share of the prompt)"] * any(r.budget for r in rows)]
    frame = frame_of([*named, *columns], [*(words[name] for name in named), *columns.values()])
    return _table(frame, _shared(words, named), legend, rows, named)


def _table(
    frame: pd.DataFrame, title: str, legend: Sequence[str], rows: Sequence[Result], named: list[str]
) -> TextTable:
    whens = {row.when for row in rows} - {""}
    when = [f"when: {'; '.join(map(in_words, whens.pop().split(', ')))}"] if len(whens) == 1 else []
    left, groups = [name for name in named if name not in RIGHT], [name for name in GROUPS if name in named]
    return TextTable(frame, title, ["; ".join(legend), *when, *notes(rows)], left, groups)


def grouped(rows: Sequence[Result]) -> list[Result]:
    """The rows grouped by model, task and schedule in order of appearance, rows without eviction first."""
    places = [*dict.fromkeys((row.model_label, row.task_label) for row in rows)]
    whens = ["", *dict.fromkeys(row.when for row in rows)]
    several = len({*whens}) > 2  # otherwise all rows have the same schedule
    return sorted(
        rows, key=lambda row: (places.index((row.model_label, row.task_label)), several and whens.index(row.when))
    )


def _words(rows: Sequence[Result]) -> dict[str, list[str]]:
    """The text columns: names, fields that differ, schedule and decoding rule."""
    hidden = {"compress"}  # the schedule contains it, except for rows that evict nothing
    if len({row.compress for row in rows if not row.evicts}) > 1:
        hidden = set()
    keys = [key for key in dict.fromkeys(key for row in rows for key in row.differs) if key not in hidden]
    return {
        **{name: [getattr(row, name) for row in rows] for name in ("model", "task", "policy", "subset")},
        **{key: [text_of(row.differs[key]) if key in row.differs else NONE for row in rows] for key in keys},
        "schedule": [row.moments[0] or NONE for row in rows],
        "decode": [row.moments[1] or NONE for row in rows],
        "state": [row.state for row in rows],
        "budget": [NONE if row.budget is None else str(row.budget) for row in rows],
        "n": [str(row.n) for row in rows],
    }


def _named_columns(words: dict[str, list[str]], always: Sequence[str]) -> list[str]:
    """The columns in which rows differ; schedules of rows without eviction are ignored."""
    ignored = {"schedule": {NONE}, "decode": {NONE}}
    return [name for name in words if name in always or len(set(words[name]) - ignored.get(name, set())) > 1]


def _shared(words: dict[str, list[str]], shown: Sequence[str]) -> str:
    """The title with shared values: "model pocket, task niah(lengths=[300]), 20 examples"; a range if n differs."""
    silent = {"policy", "schedule", "decode", "n", *shown}
    usual = {"subset": "all", "state": FINISHED, "budget": NONE}
    common = {key: values[0] for key, values in words.items() if len(set(values)) == 1}
    same = {key: value for key, value in common.items() if key not in silent and value != usual.get(key)}
    for name, roots in (("model", ("model.", "generation.")), ("task", ("task.",))):
        fields = [key for key in same if key.startswith(roots)] if name in same else []
        text = ", ".join(f"{key.partition('.')[2]}={same.pop(key)}" for key in fields)
        if text:
            same[name] += f"({text})"
    counts = sorted(set(words["n"]), key=int)
    n = " to ".join(dict.fromkeys((counts[0], counts[-1])))
    parts = [f"{name} {value}" for name, value in same.items()]
    return ", ".join([*parts, *([] if "n" in shown else [f"{n} example{'s' * (n != '1')}"])])


def pivot(rows: Sequence[Result], across: str) -> TextTable:
    """One row per policy, one column per budget or task, as in the tables of papers.

    across="budget": scores (or NLL) with 95% intervals; runs without a budget have a separate column.
    across="task": scores times 100, one row per policy and budget, with the mean if every task has a score.
    """
    by_task = across == "task"
    rows = grouped([row for row in rows if not by_task or row.measure == "score"])
    if not rows:
        raise UsageError("--pivot task needs scores, but no run has any")
    words = _words(rows)
    if by_task:  # tasks with one name but different fields are separate columns
        several = len({row.task for row in rows}) < len({row.task_label for row in rows})
        words["task"] = [row.task_label if several else row.task for row in rows]
        words = {key: values for key, values in words.items() if not key.startswith("task.")}
    named = [name for name in _named_columns(words, ("policy",)) if name not in ("n", "state", across)]
    columns = list(dict.fromkeys(words[across]))
    if not by_task:
        columns.sort(key=lambda budget: budget_order(None if budget == NONE else float(budget)))
    cells: dict[tuple[str, ...], dict[str, list[Result]]] = {}
    for place, row in enumerate(rows):
        label = tuple(words[name][place] for name in named)
        cells.setdefault(label, {}).setdefault(words[across][place], []).append(row)
    differences = corrected({row: row.difference for row in rows if row.difference})
    starred = {row for row, one in differences.items() if one.claims}
    several_n = len({row.n for row in rows}) > 1

    def cell(row: Result) -> str:
        value = _percent(row) if by_task else measure(row) + "*" * (row in starred)
        n = [f"n={row.n}"] if several_n or not row.finished else []
        return " ".join([value, *([f"[{', '.join(['unfinished'] * (not row.finished) + n)}]"] if n else [])])

    body = [
        [*label, *("; ".join(map(cell, found.get(name, []))) or NONE for name in columns)]
        for label, found in cells.items()
    ]
    titles = ["no budget" if name == NONE else name for name in columns]
    if by_task and len(columns) > 1:
        titles.append("average")
        for line, found in zip(body, cells.values(), strict=True):
            scores = [of[0].score for of in found.values() if len(of) == 1 and of[0].score is not None]
            line.append(f"{100 * fmean(scores):.1f}" if len(scores) == len(columns) else NONE)
    kinds = dict.fromkeys(_MEASURES[row.measure] for row in rows)
    what = "score x 100" if by_task else f"{' or '.join(kinds)} (95% CI)"
    legend = ["budget: tokens per KV head (below 1: share of the prompt)"]
    if not by_task and starred:
        legend.append(f"difference from full on the same examples, {STAR}")
    frame = frame_of([*named, *titles], list(zip(*body, strict=True)))
    return _table(frame, f"{what} by {across}: {_shared(words, [*named, across])}", legend, rows, named)


_MEASURES = {
    "score": "score",
    "NLL": "NLL in nats per token, lower is better",
    "KL": "KL from full in nats per token, lower is better",
}


def _percent(row: Result) -> str:
    return "failed" if row.score is None else f"{100 * row.score:.1f}"


def chosen(rows: Sequence[Result], names: Sequence[str]) -> TextTable:
    """Columns of the tidy table by name."""
    frame = tidy(rows, names)
    left = [str(name) for name in frame if frame[name].dtype.kind not in "iuf"]
    return TextTable(frame.astype(object).where(frame.notna(), "").map(_digits), left=left)


def _digits(value: object) -> str:
    """Four digits of a number, or all before the point; other values as text."""
    return f"{value:{'.0f' if abs(value) >= 1000 else '.4g'}}" if isinstance(value, float) else str(value)


def notes(rows: Sequence[Result]) -> list[str]:
    """Warnings about comparing the rows, one line each."""
    found = [f"mixed versions in {row.run_id}: {row.mixed}" for row in rows if row.mixed]
    if any(not row.finished for row in rows):
        found.append("unfinished: n examples so far; run the same command again to continue")
    few = [row for row in rows if row.to_full is not None and row.difference is None and row.gap is None]
    if any(row.value is not None for row in few):
        found.append(f"vs full needs at least {FEWEST} shared examples")
    evicting = [row for row in rows if row.evicts and row.naming.reads is None]
    modes, schedules, decodes = (
        sorted({value for row in evicting if (value := getattr(row, name))})
        for name in ("compress", "schedule", "decode")
    )
    context = "a context is compressed before the question is known, a prompt afterwards"
    blocks = "eviction after the prompt uses the question, eviction in blocks does not"
    if modes == ["context"]:
        blocks = "eviction in blocks does not use the rest of the context"
    every = "with evict every k, up to k tokens are held above the budget"
    grow = "with grow, new tokens are kept in addition to the budget" if "grow" in decodes else every
    for title, values, why, field in (
        ("compress differs", modes, context, "compress"),
        ("schedules differ", schedules, blocks, "schedule"),
        ("decoding differs", decodes, grow, "decode"),
    ):
        if len(values) > 1:
            found.append(f"{title} ({', '.join(values)}): {why}; compare rows with the same {field}=")
    return found
