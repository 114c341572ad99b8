"""Loads runs from disk as results: with labels, in order, each with its baseline (the run of the full cache)."""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from kvbench.errors import UsageError
from kvbench.results.columns import frame
from kvbench.results.files import read_yaml
from kvbench.results.labels import NAMED, Naming, budget_order, differing, names, natural, text_of, usual
from kvbench.results.metrics import FILE_NAME as METRICS
from kvbench.results.metrics import read_metrics
from kvbench.results.pairs import shared
from kvbench.results.result import FINISHED, UNFINISHED, Result, numbers
from kvbench.results.samples import FILE_NAME, Sample, read_samples
from kvbench.results.session import other_versions

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger(__name__)


class Results(Sequence[Result]):
    """Runs as a sequence, and as a DataFrame (`to_pandas`).

    in_order: sort by model, task and budget, the full cache first, then by name; otherwise keep the given order. A run
    that is given twice (`full` at two budgets) is one row. Every row has the fields in which it differs from the
    others (`differs`) and its baseline: the run of the full cache with the same model, dtype, task, seed and generation
    settings that shares most examples with it. Slices keep labels and baselines.
    """

    def __init__(self, rows: Iterable[Result], in_order: bool = True) -> None:
        named = _named(list({row.run_id or f"{row.naming} {row.budget}": row for row in rows}.values()))
        self._rows = _with_baselines(sorted(named, key=_place) if in_order else named)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401 - a result, or some of them
        if not isinstance(index, slice):
            return self._rows[index]
        some = copy.copy(self)
        some._rows = self._rows[index]
        return some

    def by(self, keys: Sequence[str]) -> list[Result]:
        """The rows, each followed by its parts by these metadata keys. Raises UsageError for an unknown key."""
        known = sorted({key for row in self for sample in row.samples for key in sample.metadata})
        for key in keys:
            if key not in known:
                raise UsageError(f"--by {key} is not a metadata key of any example (allowed: {', '.join(known)})")
        return [each for row in self for each in (row, *(part for key in keys for part in row.parts(key)))]

    def to_pandas(self, by: Sequence[str] = ()) -> pd.DataFrame:
        """A DataFrame with one row for each result and all columns, including one for each field that differs.

        by: metadata keys (task, length, depth, ...); each of their values adds a row.
        """
        return frame(self.by(by))


def load_results(folder: Path) -> Results:
    """All runs in or below `folder`. An unfinished run has its finished examples and `state` "unfinished".

    Runs that cannot be read or have no examples are skipped with a warning. Of several copies of a run, only the one
    with most examples is returned. Raises UsageError if no run can be read.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder")
    left_out: dict[Path, str] = {}
    longest: dict[str, Result] = {}
    for place in _places(folder):
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
        why = next(iter(left_out.values())) if len(left_out) == 1 else f"none of its folders has a readable {FILE_NAME}"
        raise UsageError(f"{folder} has no readable run: {why}")
    for place, reason in left_out.items():
        log.warning("%s is skipped: %s", place, reason)
    return Results(sorted(longest.values(), key=lambda row: row.folder))


def read_result(folder: Path, limit: int | None = None) -> Result:
    """Read a run, or its first `limit` examples. Raises UsageError if `folder` is not a readable run."""
    file = FILE_NAME
    try:
        samples = tuple(read_samples(folder / FILE_NAME)[:limit])
        if not samples:
            raise ValueError("is missing or has no example")
        file = "config.yaml"
        config = read_yaml(folder / file)
        file = "config.yaml or environment.json"
        return _result(folder, samples, config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise UsageError(f"{folder} is not a readable run ({file}: {reason})") from error


def _result(folder: Path, samples: tuple[Sample, ...], config: Mapping[str, Any]) -> Result:
    environment = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    stored, resumed = config["naming"], environment.get("resumed", [])
    naming = Naming(**{**stored, "changed": tuple(stored["changed"])})
    found = Result(
        folder=folder,
        run_id=config["run_id"],
        identity=config["identity"],
        environment=environment,
        samples=samples,
        naming=naming,
        state=FINISHED if (folder / METRICS).exists() else UNFINISHED,
        mixed=other_versions([environment, *resumed[:-1]], resumed[-1]) if resumed else "",
        **{name: getattr(naming, name) for name in NAMED},
        **numbers(read_metrics(folder, samples)),
    )
    _ = found.setting, found.is_full, environment["hardware"]  # raises KeyError if the files have no such field
    return found


def _named(rows: Sequence[Result]) -> list[Result]:
    """The rows with the fields in which they differ, and with labels that contain these fields."""
    named = []
    for row, fields in zip(rows, differing([(row.naming, row.identity) for row in rows]), strict=True):
        labels = names(row.naming, row.identity, fields)
        others = {k: text_of(v) for k, v in fields.items() if not k.startswith(("policy.", "task.", "model.", "gener"))}
        if row.when or row.is_full:
            others.pop("compress", None)  # `when` contains it
        unfinished = [] if row.finished else [f"[unfinished, n={row.n}]"]
        name = " ".join([labels["policy"], *(f"{key}={value}" for key, value in others.items()), *unfinished])
        named.append(replace(row, labels=labels, differs=fields, name=name, line=name))
    most_have = usual([*{(row.name, row.when): row.moments for row in named if row.when}.values()])
    for place, row in enumerate(named):
        if unusual := ", ".join(a for a, b in zip(row.moments, most_have, strict=True) if a not in ("", b)):
            named[place] = replace(row, line=f"{row.name} ({unusual})")
    return named


def _with_baselines(rows: Sequence[Result]) -> list[Result]:
    """The rows, each with its baseline: the run of the full cache with the same setting and most common examples.

    Ties go to the run with the fewest changed fields, then to the first. Runs of the full cache have no baseline.
    """
    found = []
    for row in rows:
        full = [] if row.is_full else [other for other in rows if other.is_full and other.setting == row.setting]
        common = {id(other): len(shared(other.samples, row.samples)) for other in full} if len(full) > 1 else {}
        full.sort(key=lambda other: (-common.get(id(other), 0), len(other.naming.changed)))
        found.append(replace(row, baseline=full[0] if full else None))
    return found


def _place(row: Result) -> tuple[Any, ...]:
    """A key that sorts rows."""
    rest = " ".join([row.when, row.compress, *map(text_of, row.differs.values()), row.run_id])
    model, task, policy = natural(row.model), natural(row.task_label), natural(row.policy)
    return model, task, budget_order(row.budget), row.policy != "full", policy, natural(rest)


def _places(folder: Path) -> list[Path]:
    """Every folder in or below `folder` with a samples file (or a broken link of that name), sorted."""
    return sorted(Path(place) for place, folders, files in os.walk(folder) if FILE_NAME in (*folders, *files))
