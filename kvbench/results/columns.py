"""The columns of the tidy table: name, meaning, type, and the field of a result with the value."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvbench.errors import UsageError, one_line
from kvbench.results.labels import NAMED, Naming
from kvbench.results.metrics import Numbers, metrics
from kvbench.results.result import Result, numbers

if TYPE_CHECKING:
    import pandas as pd

_TYPES = {"words": "string", "json": "string", "integer": "Int64", "number": "Float64"}


@dataclass(frozen=True)
class Column:
    """One column of the tidy table.

    at: the field of a result with the value, or a dotted path to it; "": the field with the column's name.
    """

    name: str
    meaning: str
    kind: Literal["words", "integer", "number", "json"] = "number"
    at: str = ""

    def value(self, row: Result) -> Any:  # noqa: ANN401 - of the column's kind
        """The value for a result, or None."""
        value: Any = row
        for step in (self.at or self.name).split("."):
            if value is not None:
                value = value.get(step) if isinstance(value, Mapping) else getattr(value, step)
        return json.dumps(value) if self.kind == "json" and value is not None else value


def _interval(name: str, meaning: str, at: str = "") -> tuple[Column, ...]:
    """A field of `Changes` with its mean and the ends of its 95% interval."""
    at = f"changes.{at or name}"
    ends = (Column(f"{name}_{end}", f"{word} end of its 95% interval", at=f"{at}.{end}") for end, word in _ENDS)
    return (Column(name, meaning, at=f"{at}.mean"), *ends)


_ENDS = ("low", "lower"), ("high", "upper")
_MEASURED = tuple(Column(one.name, one.metadata["meaning"]) for one in fields(Numbers))
_BYTES = next(place for place, column in enumerate(_MEASURED) if column.name == "cache_share") + 1
COLUMNS = (
    Column("run_id", "folder of the run", "words"),
    Column("model", "name of the model", "words"),
    Column("weights", "hub id and commit, or sha256 of the files", "words"),
    Column("dtype", "number format of the model and its cache", "words", at="identity.dtype"),
    Column("policy", "name of the preset, as in policy=", "words"),
    Column("schedule", "when tokens of the prompt are evicted: prompt or blocks of m", "words"),
    Column("decode", "decoding rule: evict, evict every k tokens, or grow", "words"),
    Column("policy_fields", "every field of the policy, as JSON", "json", at="identity.policy"),
    Column("budget", "tokens per KV head per layer, or share of the prompt"),
    Column("budget_kind", "tokens_per_head, share or none", "words"),
    Column("compress", "what is compressed: prompt, or context (the part before the question)", "words"),
    Column("task", "name of the task", "words"),
    Column("task_fields", "every field of the task, as JSON", "json", at="identity.task"),
    Column("subset", "all examples, or those of one task, length or depth (--by)", "words"),
    Column("seed", "seed of the examples", "integer", at="identity.seed"),
    Column("n_seeds", "number of seeds (--over-seeds)", "integer"),
    Column("seed_sd", "standard deviation of the score or NLL over the seeds (--over-seeds)"),
    Column("n", "examples", "integer"),
    Column("n_failed", "examples that exceeded their budget or failed; if not 0, there is no score", "integer"),
    Column("n_shared", "examples that shared prefill or decoding; if not 0, there are no times", "integer"),
    Column("score", "mean over the examples, 0 to 1"),
    Column("score_low", "lower end of the score's 95% interval"),
    Column("score_high", "upper end of the score's 95% interval"),
    Column("interval", "method of the interval", "words"),
    Column("score_vs_full", "score minus that of full on the same examples", at="vs_full.mean"),
    Column("score_vs_full_low", "lower end of its 95% interval (Tango, or bootstrap)", at="vs_full.low"),
    Column("score_vs_full_high", "upper end of its 95% interval", at="vs_full.high"),
    Column("score_vs_full_p", "its two-sided p (McNemar, or bootstrap), not corrected for other rows", at="vs_full.p"),
    *_interval("lost", "score lost against full: answers right there and wrong here (graded: mean of the losses)"),
    *_interval("gained", "score gained against full: wrong there and right here (graded: mean of the gains)"),
    *_interval("lost_of_right", "share of the answers right under full that are wrong here"),
    Column("flips", "lost + gained, for right-or-wrong answers", at="changes.flips"),
    *_interval("length_change", "tokens of the answer (EOS included) minus those under full", at="length"),
    Column("length_ratio", "tokens of all answers / tokens of all answers under full", at="changes.length_ratio"),
    *_interval("cut_vs_full", "cut_share minus that of full on the same examples", at="cut"),
    *_interval("looping_vs_full", "looping_share minus that of full on the same examples", at="looping"),
    *_interval("rep_4_vs_full", "rep_4 minus that of full on the same examples", at="rep_4"),
    Column("nll", "-log p of given tokens in nats, mean over all scored tokens; lower is better"),
    Column("nll_low", "lower end of the NLL's 95% interval over texts"),
    Column("nll_high", "upper end of the NLL's 95% interval over texts"),
    Column("perplexity", "exp of the NLL, lower is better"),
    Column("nll_vs_full", "NLL minus that of full on the same texts; above 0 is worse", at="gap.nll"),
    Column("nll_vs_full_low", "lower end of its 95% interval (paired bootstrap)", at="gap.interval.low"),
    Column("nll_vs_full_high", "upper end of its 95% interval", at="gap.interval.high"),
    Column("nll_vs_full_p", "its two-sided p (paired bootstrap), not corrected for other rows", at="gap.interval.p"),
    Column("perplexity_gap", "perplexity minus that of full on the same texts", at="gap.perplexity"),
    Column("scored_tokens", "number of scored tokens of all texts", "integer"),
    Column("block", "m: tokens scored between two evictions", "integer"),
    Column("max_kept_tokens", "[layer][KV head] most tokens held during scoring, as JSON", "json"),
    Column("nll_curve", "cumulative mean NLL by context length, as JSON", "json", at="curve"),
    Column("official", "aggregates of the benchmark's own scripts, as JSON", "json"),
    Column("watched", "numbers of watchers of evictions (`watch=`), mean per example, as JSON", "json"),
    Column("official_intervals", "95% intervals of the aggregates over subsets, as JSON", "json"),
    *_MEASURED[:_BYTES],
    Column("bits_per_number", "quantized stores: bits used for each number of the full cache"),
    Column("ratio_to_16_bit", "quantized stores: full cache in 16 bits / bytes used"),
    *_MEASURED[_BYTES:],
    Column("code", "digest of the code", "words", at="identity.code"),
    Column("device", "GPU or processor", "words"),
    Column("kvbench_revision", "git commit, if known", "words", at="environment.kvbench_revision"),
    Column("mixed", "versions that differ within the run (allow_version_mismatch=true)", "words"),
    Column("state", "finished, or unfinished (n examples so far)", "words"),
)


def frame(rows: Sequence[Result], names: Sequence[str] = ()) -> pd.DataFrame:
    """One row for each result; all columns, or those of `names`.

    They are followed by a column for each field that differs between the rows or from its preset, such as
    "policy.scorer.window", with lists and mappings as JSON text. Missing values are NA of the column's type.
    """
    import pandas as pd  # imported here, so that `kvbench` starts quickly

    chosen = [column for column in COLUMNS if not names or column.name in names]
    series = {c.name: pd.Series([c.value(row) for row in rows], dtype=_TYPES[c.kind]) for c in chosen}
    for key in dict.fromkeys(key for row in rows for key in row.differs if key not in series):
        values = [row.differs.get(key) for row in rows]
        if len({type(value) for value in values} - {type(None)}) > 1 or any(isinstance(v, list | dict) for v in values):
            values = [None if value is None else json.dumps(value) for value in values]
        series[key] = pd.Series(values, dtype=object).convert_dtypes()
    return pd.DataFrame({name: series[name] for name in names or series})


_FIELDS = "policy_fields", "task_fields"
_READ = *NAMED, "run_id", "weights", *_FIELDS, "budget", "budget_kind", "subset", "n", "n_failed"
"""The columns that `read_table` needs."""


def read_table(path: Path) -> list[Result]:
    """The runs of a tidy table, without samples. Raises UsageError for other files."""
    import pandas as pd

    def refusal(reason: str) -> UsageError:
        makes = "kvbench results collect FOLDER -o runs.csv"
        return UsageError(f"{path} is not a table of runs: {reason}; `{makes}` writes one")

    try:
        texts = {column.name: "string" for column in COLUMNS if column.kind in ("words", "json")}
        table = pd.read_csv(path, dtype=texts) if path.suffix == ".csv" else pd.read_parquet(path)
        if lacking := [name for name in _READ if name not in table]:
            raise refusal(f"it has no column {', '.join(lacking)}")
        rows = table[table["subset"] == "all"].to_dict("records")
        if not rows:
            raise refusal("it has no row with subset=all")
        for column in COLUMNS:
            values = table[column.name].dropna() if column.name in table else ()
            if column.kind in ("integer", "number") and not all(isinstance(value, Real) for value in values):
                raise refusal(f"column {column.name} has a value that is not a number")
        return [_result({str(k): None if pd.isna(v) else v for k, v in row.items()}) for row in rows]
    except UsageError:
        raise
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, OSError) as error:
        raise refusal(f"it cannot be read ({one_line(error)})") from error


def _result(row: dict[str, Any]) -> Result:
    tree = {c.name: json.loads(row[c.name]) for c in COLUMNS if c.kind == "json" and row.get(c.name) is not None}
    if not all(isinstance(tree[name], dict) for name in _FIELDS):
        raise TypeError(f"{' and '.join(_FIELDS)} must be JSON objects")
    budget = int(row["budget"]) if row["budget_kind"] == "tokens_per_head" else row["budget"]
    same: dict[str, Any] = {name: row[name] for name in ("dtype", "seed", "compress", "code") if name in row}
    identity: dict[str, Any] = {"model": {"weights": row["weights"]}, "budget": budget, **same}
    identity |= {"policy": tree["policy_fields"], "task": tree["task_fields"]}
    block, reads = row.get("block"), row.get("scored_tokens") is not None
    changed = tuple(key for key, value in row.items() if key.startswith(("policy.", "task.")) and value is not None)
    scored = None if not reads else "" if block is None else f"m={block:g}"
    names = {name: row[name].partition("(")[0].strip() for name in NAMED}  # old tables have "snapkv (grow)"
    naming = Naming(**names, changed=changed, reads=scored)
    known = {field.name for field in fields(Result)}
    values = {k: v for k, v in {**numbers(metrics(())), **row, **tree}.items() if k in known}
    values |= {"n": int(row["n"]), "n_failed": int(row["n_failed"]), "mixed": row.get("mixed") or ""}
    values |= {
        **names,
        "reads": reads,
        "curve": tree.get("nll_curve"),
        "folder": Path(str(row["run_id"])),
        "samples": (),
    }
    return Result(**values, identity=identity, environment={}, naming=naming)
