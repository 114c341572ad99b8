"""Finished runs as they lie on disk, as results: named so that rows can be told apart, each with its baseline."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from kvbench.analysis.columns import frame
from kvbench.analysis.metrics import metrics
from kvbench.analysis.metrics_file import FILE_NAME as METRICS
from kvbench.analysis.metrics_file import read_metrics
from kvbench.analysis.result import FINISHED, Result, numbers
from kvbench.identity.environment import other_versions
from kvbench.identity.labels import Naming, budget_order, columns, differing, names, natural, parted, usual
from kvbench.records.cell_state import read_state
from kvbench.records.definition import FILE_NAME as SWEEP
from kvbench.records.definition import Entry, read_definition
from kvbench.records.files import read_yaml
from kvbench.records.sample import Sample
from kvbench.records.samples import FILE_NAME, read_samples
from kvbench.terminal.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger(__name__)


def load_results(folder: Path, unfinished: bool = False) -> Results:
    """Every finished run in or below `folder`, in the order of tables.

    Runs that are not finished, cannot be read or are copies are left out, with a warning; of copies the longest counts.
    unfinished: the cells of the folder's sweeps that have no finished run are rows as well, at the end.
    Raises UsageError where there is no finished run that can be read.
    """
    rows = _found(Path(folder))
    known = {row.run_id for row in rows}
    cells = [cell for cell in _cells(Path(folder)) if cell.run_id not in known] if unfinished else []
    if cells:
        log.warning("%d cells have no finished run: column state says why", len(cells))
    return Results([*rows, *cells])


class Results(Sequence[Result]):
    """Results as rows: named so that every field in which two differ is told, each knowing its baseline.

    in_order: by model, task and budget as a number, the full cache first, then by name; else as they are given. A run
    that is given twice (`full` at two budgets) is one row.
    """

    def __init__(self, rows: Iterable[Result], in_order: bool = True) -> None:
        unique = {row.run_id or f"{row.naming} {row.budget}": row for row in rows}.values()
        named = [*_named([row for row in unique if row.state == FINISHED]), *(r for r in unique if r.state != FINISHED)]
        self._rows = _with_baselines(sorted(named, key=_place) if in_order else named)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401 - a result, or a list of them
        return self._rows[index]

    def by(self, keys: Sequence[str]) -> list[Result]:
        """The rows, each followed by its parts by these keys of its examples' metadata. UsageError for another key."""
        known = sorted({key for row in self for sample in row.samples for key in sample.metadata})
        for key in keys:
            if key not in known:
                raise UsageError(f"--by {key} is in the metadata of no example (allowed: {', '.join(known)})")
        return [each for row in self for each in (row, *(part for key in keys for part in row.parts(key)))]

    def to_pandas(self, by: Sequence[str] = ()) -> pd.DataFrame:
        """The tidy table as a DataFrame, a row a result; by: keys whose values have rows of their own."""
        return frame(self.by(by))


def read_result(folder: Path, limit: int | None = None) -> Result:
    """Read a run, or its first `limit` examples. Raises UsageError where `folder` holds no readable run."""
    try:
        samples = tuple(read_samples(folder / FILE_NAME)[:limit])
    except ValueError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"{folder} is not a readable run ({FILE_NAME}: {error.strerror})") from error
    if not samples:
        raise UsageError(f"{folder} is not a readable run ({FILE_NAME} is missing or holds no example)")
    try:
        config = read_yaml(folder / "config.yaml")
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"{folder} is not a readable run (config.yaml: {' '.join(str(error).split())})") from error
    try:
        return _result(folder, samples, config)
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder} is not a readable run (environment.json: {error})") from error
    except (KeyError, TypeError, AttributeError) as error:
        said = f"is there no {error}?" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"{folder} is not a readable run (config.yaml or environment.json: {said})") from error


def _result(folder: Path, samples: tuple[Sample, ...], config: Mapping[str, Any]) -> Result:
    environment = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    called, made_of, resumed = config["names"], config.get("naming"), environment.get("resumed", [])
    if made_of is None:  # of an older version
        naming = Naming(parted(called["policy"])[0], called["model"], called["task"])
    else:
        naming = Naming(**{**made_of, "changed": tuple(made_of["changed"])})
    found = Result(
        folder=folder,
        run_id=config["run_id"],
        identity=config["identity"],
        environment=environment,
        samples=samples,
        naming=naming,
        mixed=other_versions([environment, *resumed[:-1]], resumed[-1]) if resumed else "",
        **{name: called[name] for name in ("model", "policy", "task")},
        **numbers(read_metrics(folder, samples)),
    )
    _ = found.setting, found.is_full, environment["hardware"]  # what every table reads of the two files
    return found


def _named(rows: Sequence[Result]) -> list[Result]:
    """The rows of a table, with names that tell every field in which two of them differ."""
    named = []
    for row, keys in zip(rows, differing([(row.naming, row.identity) for row in rows]), strict=True):
        called, told = names(row.naming, row.identity, keys), columns(row.identity, keys)
        beside = {k: v for k, v in told.items() if k != "compress" or not (row.when or row.is_full)}  # `when` says it
        name = " ".join([called["policy"].partition(" (")[0], *(f"{key}={value}" for key, value in beside.items())])
        model, policy, task = called["model"], called["policy"], called["task"]
        named.append(replace(row, model=model, policy=policy, task=task, differs=told, name=name))
    most_have = usual([*{(row.name, row.when): row.moments for row in named if row.when}.values()])
    for place, row in enumerate(named):
        other = ", ".join(own for own, most in zip(row.moments, most_have, strict=True) if own not in ("", most))
        named[place] = replace(row, line=f"{row.name} ({other})" if other else row.name)
    return named


def _with_baselines(rows: Sequence[Result]) -> list[Result]:
    """The rows, each knowing the full cache's of the same model, dtype, task, seed and generation.

    What counts is what ran, not its name; of several the one with the fewest changes, then the first, is the baseline.
    """
    full = [row for row in reversed(rows) if row.is_full]
    full.sort(key=lambda row: -len(row.naming.changed))
    baselines = {row.setting: row for row in full}
    found = [(row, baselines.get(row.setting)) for row in rows]
    return [replace(row, baseline=b if b and b.run_id != row.run_id else None) for row, b in found]


def _place(row: Result) -> tuple[Any, ...]:
    """Where a row stands among others."""
    rest = " ".join([row.compress, *row.differs.values(), row.run_id])
    model, task, policy = natural(row.model), natural(row.task), natural(row.policy)
    order = row.state != FINISHED, model, task, budget_order(row.budget)
    return *order, row.policy != "full", policy, natural(rest)


def _found(folder: Path) -> list[Result]:
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder")
    left_out: dict[Path, str] = {}
    longest: dict[str, Result] = {}
    for place in _places(folder):
        if not (place / METRICS).exists():
            left_out[place] = "the run was not finished"
            continue
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
            left_out[row.folder] = f"it is the run of {kept.folder} again"
    if not longest:
        why = next(iter(left_out.values()), "") if len(left_out) == 1 else ""
        none = f"no finished run: none of its folders has {FILE_NAME} and {METRICS}, whole and readable"
        raise UsageError(f"{folder} holds no run that can be read: {why}" if why else f"{folder} holds {none}")
    for place, sentence in left_out.items():
        log.warning("%s is left out: %s", place, sentence)
    return sorted(longest.values(), key=lambda row: row.folder)


def _places(folder: Path) -> list[Path]:
    """Every folder in or below `folder` that names samples, be it a link that leads nowhere; sorted."""
    return sorted(Path(place) for place, folders, files in os.walk(folder) if FILE_NAME in (*folders, *files))


def _cells(folder: Path) -> list[Result]:
    """Every cell of the sweeps below a folder, as if none had a finished run."""
    rows = []
    for path in sorted(folder.rglob(SWEEP)):
        try:
            rows += [_cell(path.parent, entry) for entry in read_definition(path.parent).cells]
        except UsageError as error:
            log.warning("%s", error)
    return rows


def _cell(out: Path, entry: Entry) -> Result:
    budget = entry.budget if isinstance(entry.budget, int | float) else None
    unknown: dict[str, Any] = {"model": {}, "policy": {}, "budget": budget, "task": {}}
    return Result(
        folder=out / entry.key,
        run_id=entry.run_id or "",
        model=entry.model,
        policy=entry.policy,
        task=entry.task,
        identity=entry.identity or {**unknown, "compress": entry.config.get("compress", "prompt")},
        environment={},
        samples=(),
        naming=Naming(entry.policy, entry.model, entry.task, entry.changed),
        state=_state(out, entry),
        subset="",
        name=entry.policy,
        line=entry.policy,
        **numbers(metrics(())),
    )


def _state(out: Path, entry: Entry) -> str:
    """Why there is no finished run, as far as the sweep's folder says."""
    if entry.run_id is None:
        return f"failed: {entry.error}"
    state = read_state(out, entry.run_id)
    if state is None:
        return "not begun"
    return "not finished" if state.error is None else f"failed: {state.error}"
