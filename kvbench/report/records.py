"""Finished runs as they lie on disk, each knowing the run of the full cache it is compared with."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import exp
from pathlib import Path
from typing import Any

from kvbench.analysis.metrics import by_value, metrics, token_mean
from kvbench.analysis.statistics import Difference, paired_difference
from kvbench.identity.environment import other_versions
from kvbench.identity.labels import Naming, budget_order, columns, compressed, differing, keeps_all, names, natural
from kvbench.records.sample import Sample
from kvbench.records.samples import FILE_NAME, read_samples
from kvbench.report.run_files import read_config, read_environment
from kvbench.terminal.errors import UsageError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Gap:
    """What a policy costs on the texts it shares with full: NLL (nats per token) and perplexity, less those of full.

    Both means are over tokens. interval: of the NLL, over texts; None for a single text.
    """

    nll: float
    interval: Difference | None
    perplexity: float

    @property
    def low(self) -> float | None:
        """Lower end of the NLL's 95% interval."""
        return None if self.interval is None else self.interval.low

    @property
    def p(self) -> float | None:
        """Two-sided p of the NLL's difference."""
        return None if self.interval is None else self.interval.p

    @property
    def high(self) -> float | None:
        """Upper end of the NLL's 95% interval."""
        return None if self.interval is None else self.interval.high


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
    baseline: RunRecord | None = None  # the full cache's run on the same examples, where there is one
    naming: Naming | None = None  # what the names are made of; None in runs of older versions
    differs: dict[str, str] = field(default_factory=dict)  # what tells it apart from other rows and is in no name

    @property
    def mixed(self) -> str:
        """Versions that differ between the processes that computed this run; empty where none do."""
        resumed = self.environment.get("resumed", [])
        return other_versions([self.environment, *resumed[:-1]], resumed[-1]) if resumed else ""

    @cached_property
    def vs_full(self) -> Difference | None:
        """By how much it scores higher than its baseline on the examples both have; None without one or a score."""
        baseline = self.baseline
        if baseline is None or self.metrics["score"] is None or baseline.metrics["score"] is None:
            return None
        pairs = [
            (theirs.score, ours.score)
            for theirs, ours in zip(baseline.samples, self.samples, strict=False)
            if theirs.score is not None and ours.score is not None and theirs.prompt_hash == ours.prompt_hash
        ]
        return paired_difference([first for first, _ in pairs], [second for _, second in pairs]) if pairs else None

    @cached_property
    def gap(self) -> Gap | None:
        """How much worse it predicts than its baseline; None without one, or where either has failed examples."""
        baseline = self.baseline
        if baseline is None or any(s.likelihood is None for s in (*self.samples, *baseline.samples)):
            return None
        pairs = [
            (theirs.likelihood, ours.likelihood)
            for theirs, ours in zip(baseline.samples, self.samples, strict=False)
            if theirs.likelihood and ours.likelihood and theirs.prompt_hash == ours.prompt_hash
        ]
        if not pairs:
            return None
        full, own = token_mean([theirs for theirs, _ in pairs]), token_mean([ours for _, ours in pairs])
        interval = None
        if len(pairs) > 1:
            weights = [ours.tokens for _, ours in pairs]
            interval = paired_difference([x.nll for x, _ in pairs], [x.nll for _, x in pairs], weights=weights)
        return Gap(own - full, interval, exp(own) - exp(full))

    def parts(self, key: str) -> list[RunRecord]:
        """This run, and its baseline, once for each value of a metadata key, about the examples of that value alone."""
        baselines = {} if self.baseline is None else {part.subset: part for part in self.baseline.parts(key)}
        found = []
        for value, samples in by_value(self.samples, key).items():
            subset, numbers = f"{key}={value}", metrics(samples)
            found.append(
                replace(self, samples=tuple(samples), metrics=numbers, subset=subset, baseline=baselines.get(subset))
            )
        return found


def with_baselines(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """The runs, each knowing the run of the full cache with the same model, dtype, task, seed and generation.

    What counts is what ran, not its name; of several the one with the fewest changes, then the first, is the baseline.
    """
    full = [run for run in reversed(runs) if keeps_all(run.identity)]
    full.sort(key=lambda run: -len(run.naming.changed) if run.naming else 0)
    baselines = {comparable(run): run for run in full}
    found = [(run, baselines.get(comparable(run))) for run in runs]
    return [replace(run, baseline=b if b and b.run_id != run.run_id else None) for run, b in found]


def labelled(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """The rows of a table, named so that every field that differs between two of them is told."""
    known = [(run.naming, run.identity) for run in runs if run.naming is not None]
    found = iter(differing(known))
    rows = []
    for run in runs:
        if run.naming is not None:
            keys = next(found)
            named, differs = names(run.naming, run.identity, keys), columns(run.identity, keys)
            run = replace(run, names=named, differs=differs)
        rows.append(run)
    return rows


def in_order(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """The runs as tables list them: by model, task and budget as a number, the full cache first, then by name."""
    return sorted(runs, key=lambda run: place(run.names, run.identity["budget"], _beyond_names(run)))


def _beyond_names(run: RunRecord) -> str:
    """What else tells a run from others."""
    return " ".join([compressed(run.identity), *run.differs.values(), run.run_id])


def place(names: Mapping[str, Any], budget: float | None, rest: str) -> tuple[Any, ...]:
    """Where a row stands among others. names: its model, task and policy. rest: what else tells it from others."""
    model, task, policy = (natural(str(names[name])) for name in ("model", "task", "policy"))
    return model, task, budget_order(budget), names["policy"] != "full", policy, natural(rest)


def comparable(run: RunRecord) -> tuple[str, ...]:
    """What two runs must share to be compared example by example."""
    return tuple(str(run.identity[name]) for name in ("model", "dtype", "task", "seed", "generation"))


def read_run(folder: Path, limit: int | None = None) -> RunRecord:
    """Read a run, or its first `limit` examples. Raises UsageError where `folder` holds no readable run."""
    try:
        samples = tuple(read_samples(folder / FILE_NAME)[:limit])
    except ValueError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"{folder} is not a readable run ({FILE_NAME}: {error.strerror})") from error
    if not samples:
        raise UsageError(f"{folder} is not a readable run ({FILE_NAME} is missing or holds no example)")
    config, environment = read_config(folder), read_environment(folder)
    made_of = config.get("naming")
    try:
        naming = None if made_of is None else Naming(**{**made_of, "changed": tuple(made_of["changed"])})
    except (KeyError, TypeError) as error:
        raise UsageError(f"{folder} is not a readable run (config.yaml: naming: {error})") from error
    called, identity = config["names"], config["identity"]
    return RunRecord(folder, config["run_id"], called, identity, environment, samples, metrics(samples), naming=naming)


def find_runs(folder: Path) -> list[RunRecord]:
    """Every finished run in or below `folder`, sorted by path; others are left out, with a warning.

    So are copies of a run, of which the longest counts: its examples would be counted twice.

    Raises UsageError where there is no finished run that can be read.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder")
    runs, left_out = [], {}
    for place in _places(folder):
        if not (place / "metrics.json").exists():
            left_out[place] = "the run was not finished"
            continue
        try:
            runs.append(read_run(place))
        except UsageError as error:
            left_out[place] = str(error)
    if not runs:
        why = next(iter(left_out.values()), "") if len(left_out) == 1 else ""
        none = f"no finished run: none of its folders has {FILE_NAME} and metrics.json, whole and readable"
        raise UsageError(f"{folder} holds no run that can be read: {why}" if why else f"{folder} holds {none}")
    longest: dict[str, RunRecord] = {}
    for run in runs:
        before = longest.setdefault(_same(run), run)
        if len(run.samples) > len(before.samples):
            longest[_same(run)] = run
    kept = [run for run in runs if longest[_same(run)] is run]
    others = [run for run in runs if longest[_same(run)] is not run]
    left_out |= {run.folder: f"it is the run of {longest[_same(run)].folder} again" for run in others}
    for place, sentence in left_out.items():
        log.warning("%s is left out: %s", place, sentence)
    return kept


def _places(folder: Path) -> list[Path]:
    """Every folder in or below `folder` that names samples, be it a link that leads nowhere; sorted."""
    return sorted(Path(place) for place, folders, files in os.walk(folder) if FILE_NAME in (*folders, *files))


def _same(run: RunRecord) -> str:
    """What two copies of a run share."""
    return json.dumps([run.run_id, run.identity], sort_keys=True, default=str)
