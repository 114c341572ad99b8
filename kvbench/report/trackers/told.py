"""What a dashboard is told of a run, whichever it is: its settings, a row per example, the row of the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import exp, isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from kvbench.analysis.metrics import token_mean
from kvbench.analysis.statistics import mean_interval, weighted_interval
from kvbench.identity.cell import Cell
from kvbench.identity.environment import environment
from kvbench.identity.labels import Naming, compressed, flat, moments, names
from kvbench.records.sample import Sample
from kvbench.report.columns import COLUMNS
from kvbench.report.records import RunRecord

_EVERY = 32  # the running interval moves with every 32nd part of the examples: it is a bootstrap of all of them


@dataclass(frozen=True)
class Told:
    """A run before its first example: where its files lie, how it is called, and all its settings by flat names."""

    run_id: str
    folder: Path
    title: str
    task: str
    config: dict[str, Any]


def of_cell(cell: Cell) -> Told:
    """What is told of a cell that will be computed."""
    identity = cell.identity
    return _told(cell.run_id, cell.folder, cell.naming, names(cell.naming, identity), identity, _machine(cell.device))


def of_record(record: RunRecord) -> Told:
    """What is told of a run that was computed before."""
    naming = record.naming or Naming(record.names["policy"], record.names["model"], record.names["task"])
    return _told(record.run_id, record.folder, naming, record.names, record.identity, record.environment)


def _told(
    run_id: str,
    folder: Path,
    naming: Naming,
    named: Mapping[str, str],
    identity: Mapping[str, Any],
    machine: Mapping[str, Any],
) -> Told:
    budget = [] if identity["budget"] is None else [str(identity["budget"])]
    title = " ".join([named["model"], named["policy"], *budget, named["task"]])
    return Told(run_id, folder, title, naming.task, settings(run_id, naming, identity) | _versions(machine))


def settings(run_id: str, naming: Naming, identity: Mapping[str, Any]) -> dict[str, Any]:
    """All that decides a run by flat names: the presets, and every field of policy, task and model below them.

    schedule, decode: what the policy does, None where it evicts nothing.
    """
    fields = flat({key: value for key, value in identity.items() if key != "version"})
    evicts, decodes = moments(identity)
    return {
        **fields,
        "run_id": run_id,
        "model": naming.model,
        "policy": naming.policy,
        "budget": identity["budget"],
        "schedule": evicts,
        "decode": decodes,
        "task": naming.task,
        "seed": identity["seed"],
        "compress": compressed(identity),
    }


def _versions(machine: Mapping[str, Any]) -> dict[str, Any]:
    hardware = machine.get("hardware", {})
    return {
        "device": hardware.get("device_name") or hardware.get("processor"),
        "revision": machine.get("kvbench_revision"),
        **{f"versions.{name}": version for name, version in machine.get("packages", {}).items()},
    }


@lru_cache
def _machine(device: torch.device) -> dict[str, Any]:
    return environment(device)  # it asks git: once for all cells of a process


class History:
    """The examples of a run so far, and what each adds to the curves."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []

    def add(self, sample: Sample) -> None:
        """One more example."""
        self.samples.append(sample)

    def row(self) -> dict[str, Any]:
        """The last example's numbers below `example/`, and the running means of all, named as in the tidy table.

        Where an example failed there is no running score, as in the table; nor are there seconds where they would mean
        nothing, because examples were computed together.
        """
        sample = self.samples[-1]
        return _known({**_example(sample), **self._running(), "n_failed": self._failed()})

    def _failed(self) -> int:
        return sum(sample.error is not None for sample in self.samples)

    def _running(self) -> dict[str, float]:
        if self._failed():
            return {}
        n = len(self.samples)
        bounded = n % max(1, n // _EVERY) == 0
        read = [sample.likelihood for sample in self.samples if sample.likelihood is not None]
        if len(read) == n:
            nll = token_mean(read)
            running = {"nll": nll, "perplexity": exp(min(nll, 700.0))}
            if bounded and n > 1:
                found = weighted_interval([x.nll for x in read], [x.tokens for x in read])
                running |= {"nll_low": found.low, "nll_high": found.high}
            return running
        scores = [sample.score for sample in self.samples if sample.score is not None]
        if len(scores) < n:
            return {}
        running = {"score": fmean(scores)}
        if bounded:
            interval = mean_interval(scores)
            running |= {"score_low": interval.low, "score_high": interval.high}
        return running


def _example(sample: Sample) -> dict[str, Any]:
    measured = ("prompt_tokens", "generated_tokens", "cache_bytes", "peak_bytes", "spare_bytes", "device_peak_bytes")
    return {
        "example/score": sample.score,
        "example/nll": sample.likelihood and sample.likelihood.nll,
        "example/kept_tokens": kept(sample),
        **{f"example/{name}": getattr(sample, name) for name in measured},
        "example/prefill_seconds": sample.prefill_seconds,
        "example/decode_seconds": sample.decode_seconds,
    }


def kept(sample: Sample) -> float | None:
    """Tokens held at the end, mean over layers and KV heads."""
    return fmean(n for layer in sample.kept_tokens for n in layer) if sample.kept_tokens else None


EXAMPLES = (
    *("index", "prompt_hash", "depth", "length", "prompt_tokens", "output", "references", "score", "nll"),
    *("kept_tokens", "cache_bytes", "peak_bytes", "error"),
)
"""The columns of the table of examples."""


def examples(samples: Sequence[Sample]) -> list[list[Any]]:
    """The table of examples, a row each; depth and length as the task says them, else empty."""
    return [
        [
            *(s.index, s.prompt_hash, s.metadata.get("depth"), s.metadata.get("length"), s.prompt_tokens),
            *(s.output, " | ".join(s.references), s.score, s.likelihood and s.likelihood.nll),
            *(kept(s), s.cache_bytes, s.peak_bytes, s.error),
        ]
        for s in samples
    ]


def row(record: RunRecord) -> dict[str, Any]:
    """The run's row of the tidy table, without what it does not have."""
    return _known(tidy(record))


def tidy(record: RunRecord) -> dict[str, Any]:
    """The run's whole row of the tidy table."""
    return {column.name: column.value(record) for column in COLUMNS}


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is missing, or is no number that a curve could show."""
    return {k: v for k, v in values.items() if v is not None and not (isinstance(v, float) and not isfinite(v))}
