"""Finished runs as one tidy table: `python -m kvbench.results collect DIR -o table.csv` (or .parquet, .md)."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from kvbench.errors import UsageError, refusing
from kvbench.metrics import GROUP_KEYS, by_value, metrics
from kvbench.samples import FILE_NAME, Sample, read_samples

_JSON = ("policy_fields", "task_fields", "official")
FORMATS = (".csv", ".parquet", ".md")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunRecord:
    """One run as it lies on disk; its metrics are computed from its samples."""

    folder: Path
    run_id: str
    names: dict[str, str]  # policy, model, task: as tables show them
    identity: dict[str, Any]
    environment: dict[str, Any]
    samples: tuple[Sample, ...]
    metrics: dict[str, Any]
    subset: str = "all"  # or "length=1024", where the record is about some of the examples

    def parts(self, key: str) -> list[RunRecord]:
        """This run once for each value of a metadata key, about the examples of that value alone."""
        return [
            replace(self, samples=tuple(samples), metrics=metrics(samples), subset=f"{key}={value}")
            for value, samples in by_value(self.samples, key).items()
        ]


@dataclass(frozen=True)
class Column:
    """One column of the tidy table: its name, what it says, and where a run has it."""

    name: str
    meaning: str
    value: Callable[[RunRecord], Any]


def _metric(name: str, meaning: str) -> Column:
    return Column(name, meaning, lambda run: run.metrics[name])


COLUMNS = (
    Column("run_id", "folder of the run", lambda run: run.run_id),
    Column("model", "name of the model configuration or folder", lambda run: run.names["model"]),
    Column(
        "weights", "hub id and commit, or sha256 of the files", lambda run: "@".join(run.identity["model"].values())
    ),
    Column("dtype", "numbers the model computes and stores in", lambda run: run.identity["dtype"]),
    Column("policy", "preset, and whether decoding evicts or grows", lambda run: run.names["policy"]),
    Column("policy_fields", "every field of the policy, as JSON", lambda run: json.dumps(run.identity["policy"])),
    Column("budget", "tokens per KV head per layer, or share of the prompt", lambda run: run.identity["budget"]),
    Column("budget_kind", "tokens_per_head, share or none", lambda run: _budget_kind(run.identity["budget"])),
    Column("task", "name of the task", lambda run: run.names["task"]),
    Column("task_fields", "every field of the task, as JSON", lambda run: json.dumps(run.identity["task"])),
    Column("subset", "all examples, or those of one task, length or depth (--by)", lambda run: run.subset),
    Column("seed", "seed of the examples", lambda run: run.identity["seed"]),
    _metric("n", "examples"),
    _metric("n_failed", "examples that broke their budget; with any, there is no score"),
    _metric("score", "mean over the examples, 0 to 1"),
    _metric("score_low", "lower end of the score's 95% interval"),
    _metric("score_high", "upper end of the score's 95% interval"),
    _metric("interval", "how the interval was found"),
    Column(
        "official", "aggregates as the benchmark prints them, as JSON", lambda run: json.dumps(run.metrics["official"])
    ),
    _metric("prompt_tokens", "mean per example"),
    _metric("generated_tokens", "mean per example"),
    _metric("kept_tokens", "held at the end, mean over examples, layers and KV heads"),
    _metric("cache_bytes", "held at the end, mean per example"),
    _metric("peak_bytes", "largest ever held, mean per example"),
    _metric("full_cache_bytes", "keys and values of prompt and answer, mean per example"),
    _metric("cache_share", "cache_bytes over full_cache_bytes"),
    _metric("prefill_seconds", "mean per example"),
    _metric("decode_seconds", "mean per example"),
    Column("device", "where it was computed", lambda run: _device(run.environment)),
    Column("kvbench_revision", "git commit, if known", lambda run: run.environment["kvbench_revision"]),
)


def read_run(folder: Path, limit: int | None = None) -> RunRecord:
    """Read a run, or its first `limit` examples. Raises UsageError where `folder` holds no readable run."""
    with refusing():
        samples = tuple(read_samples(folder / FILE_NAME)[:limit])
    try:
        config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        environment = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
        run_id, names, identity = config["run_id"], config["names"], config["identity"]
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError) as error:
        raise UsageError(f"{folder} is not a readable run ({type(error).__name__}: {error})") from error
    return RunRecord(folder, run_id, names, identity, environment, samples, metrics(samples))


def find_runs(folder: Path) -> list[RunRecord]:
    """Every finished run in or below `folder`, sorted by path; unfinished ones are left out, with a warning.

    Raises UsageError where there is no finished run.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder")
    runs = []
    for path in sorted(folder.rglob(FILE_NAME)):
        if (path.parent / "metrics.json").exists():
            runs.append(read_run(path.parent))
        else:
            log.warning("%s is left out: the run was not finished", path.parent)
    if not runs:
        raise UsageError(f"{folder} holds no finished run: none of its folders has {FILE_NAME} and metrics.json")
    return runs


def collect(folder: Path, output: Path, by: Sequence[str] = ()) -> int:
    """Write the tidy table of all finished runs below `folder`, one row a run, and return the number of rows.

    by: metadata keys (task, length, depth) for whose values further rows are added. The suffix of `output` says the
    format. Raises UsageError for another suffix or where nothing was found.
    """
    import pandas as pd  # here, not above: `python -m kvbench` reads runs too and should start quickly

    if output.suffix not in FORMATS:
        raise UsageError(f"-o {output} must end in one of {', '.join(FORMATS)}")
    records = [record for run in find_runs(folder) for record in (run, *(p for key in by for p in run.parts(key)))]
    rows = [{column.name: column.value(record) for column in COLUMNS} for record in records]
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
    return len(rows)


def _markdown(rows: Sequence[dict[str, Any]]) -> str:
    """A table for people: every column but the JSON ones, numbers to four digits."""
    names = [column.name for column in COLUMNS if column.name not in _JSON]
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


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line of `python -m kvbench.results`; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m kvbench.results", description=__doc__)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser(
        "collect",
        help="write one tidy table of all finished runs below a folder",
        epilog="columns: " + "; ".join(f"{column.name} ({column.meaning})" for column in COLUMNS),
    )
    command.add_argument("folder", type=Path, help="where the runs are, such as results/runs")
    command.add_argument("-o", "--output", type=Path, required=True, help=f"table to write: {', '.join(FORMATS)}")
    command.add_argument("--by", nargs="+", choices=GROUP_KEYS, default=[], help="add rows for each of their values")
    asked = parser.parse_args(arguments)
    logging.basicConfig(format="kvbench: %(message)s", stream=sys.stderr)
    try:
        rows = collect(asked.folder, asked.output, asked.by)
    except UsageError as error:
        sys.stderr.write(f"kvbench: {error}\n")
        return 2
    sys.stdout.write(f"{rows} rows -> {asked.output}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
