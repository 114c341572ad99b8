"""Results: the configuration, examples and numbers of runs, as they are loaded from disk, each with its baseline."""

from __future__ import annotations

import copy
import json
import logging
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import exp, inf
from pathlib import Path
from typing import Any, Literal, Self, overload

import yaml

from kvbench.errors import LARGEST, UsageError, instead
from kvbench.results.changes import Changes, changes
from kvbench.results.definition import is_environment
from kvbench.results.described import Described
from kvbench.results.files import fits, read_json, read_yaml
from kvbench.results.labels import (
    NAMED,
    Naming,
    budget_order,
    differing,
    names,
    natural,
    text_of,
    usual,
)
from kvbench.results.metrics import FILE_NAME as METRICS
from kvbench.results.metrics import Measured, Numbers, by_value, metrics, token_mean
from kvbench.results.pairs import NLLGap, Paired, paired, shared
from kvbench.results.samples import FILE_NAME, Sample, read_samples
from kvbench.results.session import machine, other_versions
from kvbench.results.statistics import FEWEST, Difference
from kvbench.results.summary import FILE_NAME as SUMMARY
from kvbench.results.summary import Outcome, StoredSamples, outcomes_of, read_summary
from kvbench.tasks.trust import reading
from kvbench.terminal.escapes import visible

FINISHED, UNFINISHED = "finished", "unfinished"

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Result(Numbers, Described):
    """The result of a run, or of its examples with one value of a metadata key (`parts`).

    Numbers are computed by `results.metrics`; from `nll` on they are for given texts. A number is None if it was not
    measured or an example failed. differs: the fields that differ from the presets or between the rows of a table, by
    dotted name. name: a label of the policy with all differing fields except the schedule; line: the same with the
    schedule if it is unusual in the table. state: "finished", or "unfinished" if examples are missing. baseline: the
    result of the full cache on the same examples, if there is one.
    """

    folder: Path
    samples: Sequence[Sample]
    state: str = FINISHED
    subset: str = "all"  # or "length=1024" for a part
    differs: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    line: str = ""
    mixed: str = ""  # versions that differ between the processes that computed the run
    baseline: Result | None = None
    n_seeds: int | None = None  # of runs joined by `results.seeds`
    seed_sd: float | None = None  # standard deviation of their values

    n: int
    n_failed: int
    n_shared: int
    score: Measured
    score_low: float | None
    score_high: float | None
    interval: str | None
    official: Mapping[str, float | None]
    official_intervals: Mapping[str, Sequence[float]]
    groups: Mapping[str, Mapping[str, Any]]
    reads: bool = False  # whether given texts were scored; then `value` is the NLL, and lower is better
    nll: float | None = None
    nll_low: float | None = None
    nll_high: float | None = None
    perplexity: float | None = None
    scored_tokens: int | None = None
    block: int | None = None
    max_kept_tokens: Sequence[Sequence[int]] | None = None
    curve: Mapping[str, Sequence[Any]] | None = None

    def __repr__(self) -> str:
        budget = "" if self.budget is None else f", budget {self.budget}"
        value = "no score" if self.value is None else f"{self.measure} {self.value:.3g}"
        return f"<Result {self.line or self.policy}{budget}, {self.model}, {self.task}: {value}, n={self.n}>"

    @property
    def finished(self) -> bool:
        """Whether the run has all of its examples."""
        return self.state == FINISHED

    @property
    def measure(self) -> Literal["score", "NLL", "KL"]:
        """What the run measures: the score of answers, the NLL of given texts, or the divergence from full."""
        if self.identity["task"].get("divergence") is True:
            return "KL"
        return "NLL" if self.reads else "score"

    @property
    def value(self) -> float | None:
        """The mean score, the NLL of given texts, or the KL from the full cache."""
        return {"score": self.score, "NLL": self.nll, "KL": self.kl}[self.measure]

    @property
    def ends(self) -> tuple[float, float] | None:
        """The 95% interval of `value`, or None."""
        ends = {"score": (self.score_low, self.score_high), "NLL": (self.nll_low, self.nll_high)}
        low, high = ends.get(self.measure, (self.kl_low, self.kl_high))
        return None if low is None or high is None else (low, high)

    @property
    def bits_per_number(self) -> float | None:
        """Bits used for each number of the keys and values of prompt and answer; None without a quantized store."""
        quantized = "bits" in (self.identity["policy"].get("store") or {})
        if not quantized or self.cache_bytes is None or not self.full_cache_bytes:
            return None
        width = float("".join(filter(str.isdigit, self.identity["dtype"])))
        return width * float((self.cache_bytes - (self.state_bytes or 0)) / self.full_cache_bytes)

    @property
    def ratio_to_16_bit(self) -> float | None:
        """Bytes of all keys and values in 16 bits, divided by the bytes held."""
        return None if self.bits_per_number is None else 16 / self.bits_per_number

    @cached_property
    def to_full(self) -> Paired | None:
        """The difference of `value` from the baseline's on shared examples; None without a baseline or values.

        Also None for a KL, which is a distance from the full cache.
        """
        return None if self.baseline is None or self.measure == "KL" else paired(self.baseline.outcomes, self.outcomes)

    @cached_property
    def outcomes(self) -> tuple[Outcome, ...]:
        """The score or likelihood of every prompt."""
        return getattr(self.samples, "outcomes", None) or outcomes_of(self.samples)

    @cached_property
    def prompts(self) -> tuple[str, ...]:
        """The hash of every prompt, in order."""
        return tuple(one.prompt_hash for one in self.outcomes)

    @property
    def vs_full(self) -> Difference | None:
        """The difference in score from the baseline; None without two scores, or below 5 shared examples."""
        has = self.baseline is not None and self.score is not None and self.baseline.score is not None
        return self.to_full.difference if has and self.to_full and self.to_full.difference.n >= FEWEST else None

    @cached_property
    def changes(self) -> Changes | None:
        """What differs from the answers of the baseline; None without one, or below 5 shared examples."""
        if self.baseline is None or self.measure == "KL":  # all answers are those of full
            return None
        return changes(self.baseline.outcomes, self.outcomes)

    @cached_property
    def gap(self) -> NLLGap | None:
        """The difference in NLL and perplexity from the baseline; None without one, or if an example of either failed.

        It has an interval from 5 shared texts on.
        """
        pair, full = self.to_full, () if self.baseline is None else self.baseline.outcomes
        if pair is None or any(one.nll is None for one in (*self.outcomes, *full)):
            return None
        first, nll = (token_mean(texts) for texts in zip(*pair.read, strict=True))
        return NLLGap(nll - first, pair.difference if len(pair.read) >= FEWEST else None, exp(nll) - exp(first))

    @property
    def difference(self) -> Difference | None:
        """`vs_full`, or for given texts the difference in NLL (`gap.interval`)."""
        return self.gap.interval if self.gap is not None else self.vs_full

    def parts(self, key: str) -> list[Result]:
        """One result for each value of a metadata key, numbers in order; baselines are split alike."""
        groups = by_value(self.samples, key)
        if all(isinstance(value, int | float) for value in groups):
            groups = dict(sorted(groups.items()))
        baselines = {} if self.baseline is None else {part.subset: part for part in self.baseline.parts(key)}
        return [
            replace(
                self,
                samples=tuple(samples),
                subset=(subset := visible(f"{key}={value}")),
                baseline=baselines.get(subset),
                **numbers(metrics(samples)),
            )
            for value, samples in groups.items()
        ]


def numbers(measured: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a result from the content of metrics.json, as `metrics` returns it."""
    nll = measured["likelihood"] or {}
    others = {name: value for name, value in measured.items() if name != "likelihood"}
    return {**others, "reads": bool(nll), **{k: v for k, v in nll.items() if k not in ("mean_over", "interval")}}


class Results(Sequence[Result]):
    """Runs as a sequence.

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

    @overload
    def __getitem__(self, index: int) -> Result: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> Result | Self:
        if not isinstance(index, slice):
            return self._rows[index]
        some = copy.copy(self)
        some._rows = self._rows[index]
        return some

    def by(self, keys: Sequence[str]) -> list[Result]:
        """The rows, each followed by its parts by these metadata keys. Raises UsageError for an unknown key."""
        known = sorted({key for row in self if keys for sample in row.samples for key in sample.metadata})
        for key in keys:
            if key not in known:
                raise UsageError(f"--by {key} is not a metadata key of any example{instead(key, known)}")
        return [each for row in self for each in (row, *(part for key in keys for part in row.parts(key)))]


@reading()
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
    _ = row.setting, row.is_full, row.when, row.weights, row.device, row.bits_per_number, machine(row.environment)
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
    nested = {name: getattr(row, name) for name in ("official", "official_intervals", "groups", "curve")}
    wrong = [name for name, value in whole.items() if type(value) is not int or abs(value) > LARGEST]
    wrong += [name for name, value in numbers.items() if value is not None and not _is_number(value)]
    wrong += [name for name, value in texts.items() if not isinstance(value, str | None)]
    wrong += [name for name, value in nested.items() if not isinstance(value, Mapping | None)]
    if wrong:
        raise TypeError(f"{', '.join(wrong)}: a value has another type")


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) <= LARGEST)


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
    of_setting: defaultdict[tuple[str, ...], list[Result]] = defaultdict(list)
    for row in rows:
        if row.is_full:
            of_setting[row.setting].append(row)
    common: dict[tuple[object, ...], int] = {}  # by the prompts of both runs, which are often those of others

    def in_common(other: Result, row: Result) -> int:
        key = other.prompts, row.prompts
        if key not in common:
            common[key] = len(shared(other.outcomes, row.outcomes))
        return common[key]

    for row in rows:
        full = [] if row.is_full else list(of_setting[row.setting])
        if len(full) > 1:
            full.sort(key=lambda other: (-in_common(other, row), len(other.naming.changed)))
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
