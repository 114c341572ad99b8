"""Results of runs are read from their folders, and those that are damaged or invented are left out."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import yaml

from kvbench.errors import LARGEST, UsageError, counted
from kvbench.results.definition import is_environment
from kvbench.results.files import fits, read_json, read_yaml
from kvbench.results.labels import NAMED, Naming, names
from kvbench.results.metrics import FILE_NAME as METRICS
from kvbench.results.metrics import Numbers, metrics
from kvbench.results.result import FINISHED, UNFINISHED, Result, Results, numbers
from kvbench.results.samples import FILE_NAME, Sample, read_samples
from kvbench.results.session import machine, other_versions
from kvbench.results.summary import FILE_NAME as SUMMARY
from kvbench.results.summary import StoredSamples, outcomes_of, read_summary
from kvbench.tasks.trust import reading
from kvbench.terminal.escapes import visible

log = logging.getLogger(__name__)


@reading()
def load_results(folder: Path) -> Results:
    """All runs in or below `folder`. An unfinished run has its finished examples and `state` "unfinished".

    Runs that cannot be read or have no examples are skipped with a warning. Of several copies of a run, only the one
    with most examples is returned. Raises UsageError if no run can be read.
    """
    left_out: dict[Path, str] = {}
    longest: dict[str, Result] = {}
    for place in run_folders(folder):
        try:
            row = read_result(place)
        except UsageError as error:
            left_out[place] = str(error)
            continue
        same = json.dumps([row.run_id, row.identity], sort_keys=True, default=str)
        kept = longest.get(same)
        if kept is None or len(row.samples) > len(kept.samples):
            row, kept = kept or row, row
            longest[same] = kept
        if row is not kept:
            left_out[row.folder] = f"it is a copy of {kept.folder}"
    if not longest:
        others = f" (and {counted(len(left_out) - 1, 'other')})" if len(left_out) > 1 else ""
        raise UsageError(f"{folder} has no readable run: {next(iter(left_out.values()))}{others}")
    for place, reason in left_out.items():
        log.warning("%s is skipped: %s", place, reason)
    return Results(sorted(longest.values(), key=lambda row: row.folder))


_UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What reading and computing with damaged or invented files raises."""


def read_result(folder: Path, limit: int | None = None, whole: bool = False) -> Result:
    """Read a run, or its first `limit` examples. Raises UsageError if `folder` is not a readable run.

    Of a finished run only the summary is read, and samples when they are used. whole: read and keep the samples.
    """
    file = "summary.json, metrics.json or environment.json"
    try:
        stored = None if whole else read_summary(folder)
        if stored is not None and (limit is None or limit >= len(stored.samples)):
            return _result(folder, stored.samples, stored.run, stored.numbers, whole)
        file = FILE_NAME
        samples = tuple(read_samples(folder / FILE_NAME)[:limit])
        if not samples:
            raise ValueError("is missing or has no example")
        file = "config.yaml"
        config = read_yaml(folder / file)
        if not isinstance(config, Mapping):
            raise ValueError("is empty or has no fields")
        file = "config.yaml or environment.json"
        found = _result(folder, samples, config, metrics(samples), whole)
        if not (whole or limit is not None) and found.finished:  # hundreds of runs would fill the memory
            found = replace(found, samples=StoredSamples(folder / FILE_NAME, len(samples), outcomes_of(samples)))
        return found
    except (*_UNREADABLE, yaml.YAMLError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise UsageError(f"{folder} is not a readable run ({file}: {reason})") from error


def _result(
    folder: Path, samples: Sequence[Sample], config: Mapping[str, Any], measured: Mapping[str, Any], whole: bool
) -> Result:
    """whole: the caller compares run id and identity."""
    environment = read_json(folder / "environment.json")
    stored, resumed = config["naming"], environment.get("resumed", [])
    naming = Naming(**{**stored, "changed": tuple(stored["changed"])})
    found = Result(
        folder=folder,
        run_id=visible(config["run_id"]),
        identity=config["identity"],
        environment=environment,
        samples=samples,
        naming=naming,
        state=FINISHED if _is_finished(folder, samples, measured["n"]) else UNFINISHED,
        mixed=other_versions([environment, *resumed[:-1]], resumed[-1]) if resumed else "",
        **{name: getattr(naming, name) for name in NAMED},
        **numbers(measured),
    )
    _check(found)
    if not whole and not all(fits(name, found.identity) for name in (found.run_id, folder.name)):
        raise ValueError("its identity is that of another run, or damaged")
    return found


def _is_finished(folder: Path, samples: Sequence[Sample], prompts: int) -> bool:
    """Whether metrics were written, and for no more examples than the samples have, which may have lost lines."""
    if isinstance(samples, StoredSamples):
        return True
    try:
        written, parts = read_json(folder / METRICS), read_json(folder / SUMMARY) if (folder / SUMMARY).exists() else {}
        return bool(written["n"] <= prompts and parts.get("samples", 0) <= len(samples))
    except _UNREADABLE:
        return False


def _check(row: Result) -> None:
    """Raise an error of `_UNREADABLE` if a table of the run would."""
    naming, budget = row.naming, row.budget
    texts = (row.run_id, naming.policy, naming.model, naming.task, *naming.changed, row.identity["dtype"])
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("names must be texts")
    if budget is not None and not (isinstance(budget, int | float) and 0 < budget < inf):
        raise ValueError(f"budget={budget} is not allowed")
    _ = row.setting, row.is_full, row.when, row.weights, row.device, row.bits_per_number, row.value
    _ = machine(row.environment)
    _ = names(naming, row.identity), row.identity["generation"]["decoding"]
    if not is_environment(row.environment):
        raise ValueError("environment.json does not describe a machine and its software")
    _check_kinds(row)


def _check_kinds(row: Result) -> None:
    """Raise TypeError if a value is not of the kind of its column in tables."""
    whole = {"n": row.n, "n_failed": row.n_failed, "n_shared": row.n_shared, "seed": row.identity["seed"]}
    whole |= {name: value for name in ("scored_tokens", "block") if (value := getattr(row, name)) is not None}
    measured = (*Numbers.__dataclass_fields__, "score", "score_low", "score_high", "nll", "nll_low", "nll_high")
    numbers = {name: getattr(row, name) for name in (*measured, "perplexity")}
    about = {"code": row.identity.get("code"), "kvbench_revision": row.environment["kvbench_revision"]}
    texts = {"interval": row.interval, "weights": row.weights, "device": row.device, **about}
    nested = {name: getattr(row, name) for name in ("official", "official_intervals", "groups", "watched", "curve")}
    wrong = [name for name, value in whole.items() if type(value) is not int or abs(value) > LARGEST]
    wrong += [name for name, value in numbers.items() if value is not None and not _is_number(value)]
    wrong += [name for name, value in texts.items() if not isinstance(value, str | None)]
    wrong += [name for name, value in nested.items() if not isinstance(value, Mapping | None)]
    if wrong:
        raise TypeError(f"{', '.join(wrong)}: a value has another type")


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) <= LARGEST)


def run_folders(folder: Path) -> list[Path]:
    """Every folder in or below `folder` with a samples file (or a broken link of that name), sorted.

    Raises UsageError if there is none.
    """
    if not folder.is_dir():
        why = f"is a file: choose the folder that has its runs, in which every run has a {FILE_NAME}"
        raise UsageError(f"{folder} {why if folder.exists() else 'does not exist'}")
    found = sorted(Path(place) for place, folders, files in os.walk(folder) if FILE_NAME in (*folders, *files))
    if not found:
        raise UsageError(f"{folder} has no run: there is no {FILE_NAME} in it or in its folders")
    return found
