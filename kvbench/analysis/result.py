"""One result: what was run, on which examples, and its numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import exp
from pathlib import Path
from typing import Any

from kvbench.analysis.metrics import Numbers, by_value, metrics, token_mean
from kvbench.analysis.pairs import NLLGap, Paired, paired
from kvbench.analysis.statistics import FEWEST, Difference
from kvbench.identity.labels import Naming, briefly, compressed, evicts, keeps_all, moments
from kvbench.records.sample import Sample

FINISHED, UNFINISHED = "finished", "unfinished"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Result(Numbers):
    """The examples of a run, or those with one value of a metadata key (`parts`).

    Numbers are those of `analysis.metrics`, from `nll` on of given texts; None where they were not measured, or where
    an example failed. model, policy, task: names of presets. differs: the fields that set the run apart from its
    presets or from others of a table, by dotted name. labels: model, policy and task combined with these fields.
    name: a label for the policy with all that sets the run apart, except when it evicts; line: that too, where other
    runs of the table evict at other moments. state: "finished", or "unfinished" if examples are missing.
    baseline: the result of the full cache on the same examples, if there is one.
    """

    folder: Path
    run_id: str
    model: str
    policy: str
    task: str
    identity: Mapping[str, Any]
    environment: Mapping[str, Any]
    samples: tuple[Sample, ...]
    state: str = FINISHED
    subset: str = "all"  # or "length=1024", where the result is about some of the examples
    naming: Naming
    differs: Mapping[str, Any] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    name: str = ""
    line: str = ""
    mixed: str = ""  # versions that differ between the processes that computed it
    baseline: Result | None = None

    n: int
    n_failed: int
    n_shared: int
    score: float | None
    score_low: float | None
    score_high: float | None
    interval: str | None
    official: Mapping[str, float | None]
    official_intervals: Mapping[str, Sequence[float]]
    groups: Mapping[str, Mapping[str, Any]]
    reads: bool = False  # whether given texts were scored: then it is judged by its NLL, and lower is better
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
        value = "no score" if self.value is None else f"{'NLL' if self.reads else 'score'} {self.value:.3f}"
        return f"<Result {self.line or self.policy}{budget}, {self.model}, {self.task}: {value}, n={self.n}>"

    @property
    def budget(self) -> int | float | None:
        """Tokens per KV head and layer, or share of the prompt; None where nothing is evicted."""
        budget: int | float | None = self.identity["budget"]
        return budget

    @property
    def finished(self) -> bool:
        """Whether all examples that were asked for are there."""
        return self.state == FINISHED

    @property
    def budget_kind(self) -> str:
        """The unit of the budget."""
        return "none" if self.budget is None else "tokens_per_head" if isinstance(self.budget, int) else "share"

    @property
    def weights(self) -> str | None:
        """Hub id and commit, or sha256 of the files."""
        return "@".join(self.identity["model"].values()) or None

    @property
    def device(self) -> str | None:
        """Where it was computed."""
        found = self.environment.get("hardware")
        return None if found is None else str(found["device_name"] or found["processor"])

    @property
    def slug(self) -> str:
        """The same as `policy`."""
        return self.policy

    @property
    def model_label(self) -> str:
        """The model, with the fields in which it differs from others of the table: for titles."""
        return self.labels.get("model", self.model)

    @property
    def task_label(self) -> str:
        """The task, with the fields in which it differs from its preset or others of the table: for titles."""
        return self.labels.get("task", self.task)

    @property
    def compress(self) -> str:
        """What was compressed: the prompt, or the context before its question."""
        return compressed(self.identity)

    @property
    def schedule(self) -> str | None:
        """When the prompt is evicted from: "prompt", "blocks of 128"; None where nothing is evicted."""
        return moments(self.identity)[0]

    @property
    def decode(self) -> str | None:
        """Whether decoding evicts or grows."""
        return moments(self.identity)[1]

    @property
    def moments(self) -> tuple[str, str]:
        """Schedule and decoding rule: ("blocks of 128", "evict"), ("m=4", "") of texts, "" where nothing is evicted."""
        if not self.evicts or self.naming.reads is not None:
            return self.naming.reads or "" if self.evicts else "", ""
        return (briefly(self.identity), self.decode) if self.decode else ("", "")

    @property
    def when(self) -> str:
        """The same in one: "blocks of 128, evict". Only rows that share it are comparable."""
        return ", ".join(filter(None, self.moments))

    @property
    def evicts(self) -> bool:
        """Whether fewer tokens are kept than were seen."""
        return evicts(self.identity)

    @property
    def is_full(self) -> bool:
        """Whether the full cache ran, whatever its name."""
        return keeps_all(self.identity)

    @property
    def setting(self) -> tuple[str, ...]:
        """Two results are compared example by example if they share this."""
        return tuple(str(self.identity.get(name)) for name in ("model", "dtype", "task", "seed", "generation"))

    @property
    def value(self) -> float | None:
        """Its mean score, or the NLL of the texts it was given."""
        return self.nll if self.reads else self.score

    @property
    def ends(self) -> tuple[float, float] | None:
        """The 95% interval of `value`, where it has one."""
        low, high = (self.nll_low, self.nll_high) if self.reads else (self.score_low, self.score_high)
        return None if low is None or high is None else (low, high)

    @property
    def quantises(self) -> bool:
        """Whether the run's store holds numbers as codes."""
        return "bits" in (self.identity["policy"].get("store") or {})

    @property
    def bits_per_number(self) -> float | None:
        """Bits really used for each number of the keys and values of prompt and answer; None where none is a code."""
        if not self.quantises or self.cache_bytes is None or not self.full_cache_bytes:
            return None
        width = float("".join(filter(str.isdigit, self.identity["dtype"])))
        return width * float((self.cache_bytes - (self.state_bytes or 0)) / self.full_cache_bytes)

    @property
    def ratio_to_16_bit(self) -> float | None:
        """How many times the bytes held a cache of all keys and values in 16 bits would take."""
        return None if self.bits_per_number is None else 16 / self.bits_per_number

    @cached_property
    def to_full(self) -> Paired | None:
        """By how much its value is above the baseline's on the examples both have; None without one, or any value."""
        return None if self.baseline is None else paired(self.baseline.samples, self.samples)

    @property
    def vs_full(self) -> Difference | None:
        """By how much it scores higher than its baseline; None without two scores, or below 5 shared examples."""
        has = self.baseline is not None and self.score is not None and self.baseline.score is not None
        return self.to_full.difference if has and self.to_full and self.to_full.difference.n >= FEWEST else None

    @cached_property
    def gap(self) -> NLLGap | None:
        """How much worse it predicts than its baseline; None without one, or where either has failed examples.

        It has an interval from 5 shared texts on.
        """
        if self.baseline is None or any(s.likelihood is None for s in (*self.samples, *self.baseline.samples)):
            return None
        found = self.to_full
        if found is None:
            return None
        full, own = (token_mean(texts) for texts in zip(*found.read, strict=True))
        return NLLGap(own - full, found.difference if len(found.read) >= FEWEST else None, exp(own) - exp(full))

    @property
    def difference(self) -> Difference | None:
        """The difference of its value to the baseline's: `vs_full`, or the interval of its `gap`."""
        return self.gap.interval if self.gap is not None else self.vs_full

    def parts(self, key: str) -> list[Result]:
        """This result, and its baseline, for each value of a metadata key: about the examples of that value alone."""
        baselines = {} if self.baseline is None else {part.subset: part for part in self.baseline.parts(key)}
        return [
            replace(
                self,
                samples=tuple(samples),
                subset=(subset := f"{key}={value}"),
                baseline=baselines.get(subset),
                **numbers(metrics(samples)),
            )
            for value, samples in by_value(self.samples, key).items()
        ]


def numbers(found: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a result that `metrics`, or metrics.json, holds."""
    read = found["likelihood"] or {}
    own = {name: value for name, value in found.items() if name != "likelihood"}
    return {**own, "reads": bool(read), **{k: v for k, v in read.items() if k not in ("mean_over", "interval")}}
