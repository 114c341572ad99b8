"""What a dashboard holds of a run: its settings, a row for each example, and its row of the tidy table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from kvbench.analysis.columns import COLUMNS
from kvbench.analysis.metrics import mean_kept, running
from kvbench.analysis.result import Result
from kvbench.identity.cell import Cell
from kvbench.identity.environment import environment
from kvbench.identity.labels import Naming, compressed, flat, moments, names
from kvbench.records.sample import Sample

_EVERY = 32  # the running interval moves with every 32nd part of the examples: it is a bootstrap of all of them


@dataclass(frozen=True)
class RunInfo:
    """A run before its first example: its folder, its title, and all its settings by flat names."""

    run_id: str
    folder: Path
    title: str
    task: str
    config: dict[str, Any]


def cell_info(cell: Cell) -> RunInfo:
    """Of a cell that will be computed."""
    return _info(cell, names(cell.naming, cell.identity), _machine(cell.device))


def result_info(row: Result) -> RunInfo:
    """Of a finished run."""
    return _info(row, {name: getattr(row, name) for name in ("model", "policy", "task")}, row.environment)


def _info(run: Cell | Result, named: Mapping[str, str], machine: Mapping[str, Any]) -> RunInfo:
    budget = [] if run.identity["budget"] is None else [str(run.identity["budget"])]
    title = " ".join([named["model"], named["policy"], *budget, named["task"]])
    config = settings(run.run_id, run.naming, run.identity) | _versions(machine)
    return RunInfo(run.run_id, run.folder, title, run.naming.task, config)


def settings(run_id: str, naming: Naming, identity: Mapping[str, Any]) -> dict[str, Any]:
    """All that decides a run by flat names: the presets, and every field of policy, task and model below them.

    schedule, decode: what the policy does, None where it evicts nothing.
    """
    evicts, decodes = moments(identity)
    return {
        **flat({key: value for key, value in identity.items() if key != "version"}),
        "run_id": run_id,
        "model": naming.model,
        "policy": naming.policy,
        "schedule": evicts,
        "decode": decodes,
        "task": naming.task,
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


_MEASURED = (
    *("score", "prompt_tokens", "generated_tokens", "cache_bytes", "peak_bytes", "spare_bytes", "device_peak_bytes"),
    *("prefill_seconds", "decode_seconds"),
)


def history_row(samples: Sequence[Sample]) -> dict[str, Any]:
    """The last example's numbers below `example/`, and the running means of all, named as in the tidy table.

    Where an example failed there is no running score, as in the table; nor are there seconds where they would mean
    nothing, because examples were computed together.
    """
    n, last = len(samples), samples[-1]
    found = {f"example/{name}": getattr(last, name) for name in _MEASURED}
    found |= {"example/nll": last.likelihood and last.likelihood.nll, "example/kept_tokens": mean_kept(last)}
    found |= running(samples, bounded=n % max(1, n // _EVERY) == 0)
    return _known({**found, "n_failed": sum(sample.error is not None for sample in samples)})


_EXAMPLE = (
    *("index", "sample", "prompt_hash", "depth", "length", "prompt_tokens", "output", "references", "score", "nll"),
    *("kept_tokens", "cache_bytes", "peak_bytes", "error"),
)


def example_table(samples: Sequence[Sample]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of the table of examples; depth and length as the task says them, else empty.

    Where each prompt has several answers, `sample` numbers these.
    """
    columns = [name for name in _EXAMPLE if name != "sample" or any(one.sample is not None for one in samples)]
    own = (
        {
            **vars(sample),
            **{name: sample.metadata.get(name) for name in ("depth", "length")},
            "references": " | ".join(sample.references),
            "nll": sample.likelihood and sample.likelihood.nll,
            "kept_tokens": mean_kept(sample),
        }
        for sample in samples
    )
    return columns, [[values[name] for name in columns] for values in own]


def summary_row(result: Result) -> dict[str, Any]:
    """The run's row of the tidy table, without missing values."""
    return _known({column.name: column.value(result) for column in COLUMNS})


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without None, NaN and infinities."""
    return {k: v for k, v in values.items() if v is not None and not (isinstance(v, float) and not isfinite(v))}
