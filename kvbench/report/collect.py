"""Finished runs as one tidy table: `python -m kvbench.results collect DIR -o table.csv` (or .parquet, .md)."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.report.missing import missing_rows
from kvbench.report.records import Gap, RunRecord, find_runs, gap, labelled, with_baselines
from kvbench.runs.labels import compressed
from kvbench.runs.statistics import Difference
from kvbench.terminal.errors import UsageError
from kvbench.terminal.outputs import check_output

_JSON = ("policy_fields", "task_fields", "official", "official_intervals", "max_kept_tokens", "nll_curve")
FORMATS = (".csv", ".parquet", ".md")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Column:
    """One column of the tidy table: its name, what it says, and where a run has it."""

    name: str
    meaning: str
    value: Callable[[RunRecord], Any]


def quantises(run: RunRecord) -> bool:
    """Whether the run's store holds numbers as codes."""
    return "bits" in (run.identity["policy"].get("store") or {})


def bits_per_number(run: RunRecord) -> float | None:
    """Bits really used for each number of the keys and values of prompt and answer; None where none is quantised."""
    if not quantises(run):
        return None
    share, width = run.metrics["cache_share"], int("".join(filter(str.isdigit, run.identity["dtype"])))
    return None if share is None else width * share


def ratio_to_16_bit(run: RunRecord) -> float | None:
    """How many times the bytes held a cache of all keys and values in 16 bits would take."""
    bits = bits_per_number(run)
    return None if bits is None else 16 / bits


def _metric(name: str, meaning: str) -> Column:
    return Column(name, meaning, lambda run: run.metrics[name])


def _likelihood(name: str, meaning: str, metric: str | None = None) -> Column:
    return Column(name, meaning, lambda run: (run.metrics["likelihood"] or {}).get(metric or name))


def _json(run: RunRecord, metric: str) -> str | None:
    value = (run.metrics["likelihood"] or {}).get(metric)
    return None if value is None else json.dumps(value)


def _gap_value(value: Callable[[Gap], float | None]) -> Callable[[RunRecord], float | None]:
    return lambda run: None if (found := gap(run)) is None else value(found)


def _difference(value: Callable[[Difference], float]) -> Callable[[RunRecord], float | None]:
    return lambda run: None if run.vs_full is None else value(run.vs_full)


COLUMNS = (
    Column("run_id", "folder of the run", lambda run: run.run_id),
    Column("model", "name of the model configuration or folder", lambda run: run.names["model"]),
    Column(
        "weights", "hub id and commit, or sha256 of the files", lambda run: "@".join(run.identity["model"].values())
    ),
    Column("dtype", "numbers the model computes and stores in", lambda run: run.identity["dtype"]),
    Column(
        "policy",
        "preset, the fields that are not the preset's or differ between rows, and whether decoding evicts or grows",
        lambda run: run.names["policy"],
    ),
    Column("policy_fields", "every field of the policy, as JSON", lambda run: json.dumps(run.identity["policy"])),
    Column("budget", "tokens per KV head per layer, or share of the prompt", lambda run: run.identity["budget"]),
    Column("budget_kind", "tokens_per_head, share or none", lambda run: _budget_kind(run.identity["budget"])),
    Column("compress", "prompt, or context: what stands before the question", lambda run: compressed(run.identity)),
    Column("task", "task, and the fields that are not the preset's or differ", lambda run: run.names["task"]),
    Column("task_fields", "every field of the task, as JSON", lambda run: json.dumps(run.identity["task"])),
    Column("subset", "all examples, or those of one task, length or depth (--by)", lambda run: run.subset),
    Column("seed", "seed of the examples", lambda run: run.identity["seed"]),
    _metric("n", "examples"),
    _metric("n_failed", "examples that broke their budget, or came to nothing; with any, there is no score"),
    _metric("n_shared", "examples that shared prefill or decoding with others; with any, there are no seconds"),
    _metric("score", "mean over the examples, 0 to 1"),
    _metric("score_low", "lower end of the score's 95% interval"),
    _metric("score_high", "upper end of the score's 95% interval"),
    _metric("interval", "how the interval was found"),
    Column("score_vs_full", "score less that of full on the same examples", _difference(lambda d: d.mean)),
    Column("score_vs_full_low", "lower end of its 95% interval (Tango, or bootstrap)", _difference(lambda d: d.low)),
    Column("score_vs_full_high", "upper end of its 95% interval", _difference(lambda d: d.high)),
    _likelihood("nll", "-log p in nats per token of given tokens, mean over all scored tokens; lower is better"),
    _likelihood("nll_low", "lower end of the NLL's 95% interval over texts"),
    _likelihood("nll_high", "upper end of the NLL's 95% interval over texts"),
    _likelihood("perplexity", "exp of the NLL, lower is better"),
    Column("nll_vs_full", "NLL less that of full on the same texts, above 0: worse", _gap_value(lambda g: g.nll)),
    Column("nll_vs_full_low", "lower end of its 95% interval (paired bootstrap)", _gap_value(lambda g: g.low)),
    Column("nll_vs_full_high", "upper end of its 95% interval", _gap_value(lambda g: g.high)),
    Column("perplexity_gap", "perplexity less that of full on the same texts", _gap_value(lambda g: g.perplexity)),
    _likelihood("scored_tokens", "given tokens that were scored, all texts together"),
    _likelihood("block", "m: tokens scored between two evictions"),
    Column(
        "max_kept_tokens",
        "[layer][KV head] most held while tokens were scored, the block itself included, as JSON",
        lambda run: _json(run, "max_kept_tokens"),
    ),
    Column(
        "nll_curve", "cumulative mean NLL by context length, as JSON (picture: curve)", lambda run: _json(run, "curve")
    ),
    Column(
        "official", "aggregates as the benchmark prints them, as JSON", lambda run: json.dumps(run.metrics["official"])
    ),
    Column(
        "official_intervals",
        "95% intervals of those that are means over subsets, as JSON",
        lambda run: json.dumps(run.metrics["official_intervals"]),
    ),
    _metric("prompt_tokens", "mean per example"),
    _metric("generated_tokens", "mean per example"),
    _metric("kept_tokens", "held at the end, mean over examples, layers and KV heads"),
    _metric("cache_bytes", "held at the end, spare room included, mean per example"),
    _metric("spare_bytes", "those of them in which no token lies, mean per example"),
    _metric("peak_bytes", "largest ever held, mean per example"),
    _metric("device_peak_bytes", "most memory allocated on the CUDA devices, weights included, mean per example"),
    _metric("full_cache_bytes", "keys and values of prompt and answer, mean per example"),
    _metric("cache_share", "cache_bytes less spare_bytes, over full_cache_bytes"),
    Column("bits_per_number", "of quantised stores: bits used for each number of the full cache", bits_per_number),
    Column("ratio_to_16_bit", "of quantised stores: full cache in 16 bits over the bytes used", ratio_to_16_bit),
    _metric("evicted_share", "share of the requests in which anything was evicted"),
    _metric("prefill_seconds", "mean per example"),
    _metric("decode_seconds", "mean per example"),
    _metric("decode_ms_per_token", "milliseconds for each step after the prefill, mean per example"),
    Column("code", "digest of the code that computed it", lambda run: run.identity.get("code")),
    Column("device", "where it was computed", lambda run: _device(run.environment)),
    Column("kvbench_revision", "git commit, if known", lambda run: run.environment["kvbench_revision"]),
    Column("mixed", "versions that differ within the run (allow_mixed=true); empty: none", lambda run: run.mixed),
    Column("state", "finished; of a sweep's cells also: failed and why, not finished, not begun", lambda _: "finished"),
)


def collect(folder: Path, output: Path, by: Sequence[str] = ()) -> int:
    """Write the tidy table of all finished runs below `folder`, one row a run, and return the number of rows.

    Cells of a sweep that have no finished run have a row too, with what became of them as their state.

    by: keys of the examples' metadata for whose values further rows are added. The suffix of `output` says the format.
    Raises UsageError for another suffix, a key that no example has, or where nothing was found.
    """
    import pandas as pd  # here, not above: `python -m kvbench` reads runs too and should start quickly

    check_output(output, FORMATS)
    runs = with_baselines(labelled(find_runs(folder)))
    keys = sorted({key for run in runs for sample in run.samples for key in sample.metadata})
    for key in by:
        if key not in keys:
            raise UsageError(f"--by {key} is in the metadata of no example (allowed: {', '.join(keys)})")
    records = [record for run in runs for record in (run, *(p for key in by for p in run.parts(key)))]
    rows = [{column.name: column.value(record) for column in COLUMNS} for record in records]
    rows += [
        {column.name: row.get(column.name) for column in COLUMNS}
        for row in missing_rows(folder, {run.run_id for run in runs})
    ]
    frame = pd.DataFrame(rows, columns=[column.name for column in COLUMNS])
    frame["budget"] = frame["budget"].astype("Float64")
    try:
        if output.suffix == ".csv":
            frame.to_csv(output, index=False)
        elif output.suffix == ".parquet":
            frame.to_parquet(output, index=False)
        else:
            output.write_text(_markdown(rows), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"-o {output} cannot be written ({error.strerror or error})") from error
    except ImportError as error:
        raise UsageError(f"-o {output} needs a library: `pip install pyarrow`, or write .csv") from error
    return len(rows)


def _markdown(rows: Sequence[dict[str, Any]]) -> str:
    """A table for people: every column that says something, but for the JSON ones; numbers to four digits."""
    said = [column.name for column in COLUMNS if any(row[column.name] is not None for row in rows)]
    names = [name for name in said if name not in _JSON]
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(_cell(row[name]) for name in names) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")


def _budget_kind(budget: int | float | None) -> str:
    if budget is None:
        return "none"
    return "tokens_per_head" if isinstance(budget, int) else "share"


def _device(environment: dict[str, Any]) -> str:
    hardware = environment["hardware"]
    return str(hardware["device_name"] or hardware["processor"])
