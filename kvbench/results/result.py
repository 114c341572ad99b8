"""Results: the configuration, examples and numbers of runs, as they are loaded from disk, each with its baseline."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import exp
from pathlib import Path
from typing import Any, Literal, Self, overload

from kvbench.errors import UsageError, instead
from kvbench.results.changes import Changes, changes
from kvbench.results.described import Described
from kvbench.results.labels import budget_order, differing, label_of, names, natural, text_of, usual
from kvbench.results.metrics import Measured, Numbers, by_value, metrics, token_mean
from kvbench.results.pairs import NLLGap, Paired, paired, shared
from kvbench.results.samples import Sample
from kvbench.results.statistics import FEWEST, Difference
from kvbench.results.summary import Outcome, outcomes_of
from kvbench.terminal.escapes import visible

FINISHED, UNFINISHED = "finished", "unfinished"


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
    seeds: tuple[int, ...] = ()  # of runs joined by `results.seeds`
    n_seeds: int | None = None
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
    watched: Mapping[str, float | None]
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
        store = self.identity["policy"].get("store") or {}
        quantized = "bits" in store or ".stores.per_token." in str(store.get("class"))
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


def _named(rows: Sequence[Result]) -> list[Result]:
    """The rows with the fields in which they differ, and with labels that contain these fields."""
    named = []
    dtypes = Counter(model for model, _ in {(row.model, str(row.identity.get("dtype"))) for row in rows})
    for row, fields in zip(rows, differing([(row.naming, row.identity) for row in rows]), strict=True):
        own = [key for key in fields if key != "dtype" or dtypes[row.model] > 1]  # otherwise the model implies it
        labels = names(row.naming, row.identity, own)
        others = {key: text_of(value) for key, value in fields.items() if not label_of(key)}
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
