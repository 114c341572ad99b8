"""`kvbench.evaluate`: policies, budgets and tasks on one model, as `kvbench -m` runs them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from numbers import Real
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias, Unpack

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvbench.api.fields import Fields, explaining_calls
from kvbench.api.results import Results
from kvbench.config.folders import own_folders
from kvbench.engine.compute import compute_runs
from kvbench.errors import ConfigError, UsageError, a_kind
from kvbench.models.given import borrowed, given_model, given_name
from kvbench.models.loading import GivenModel
from kvbench.policies.policy import Policy
from kvbench.results.loading import read_result
from kvbench.run.digests import check_files
from kvbench.run.run import Run, build_run
from kvbench.run.run_config import run_config
from kvbench.tasks.task import Task

Model: TypeAlias = PreTrainedModel | str | Path
_PLURAL = {"policy": "policies", "budget": "budgets", "task": "tasks"}


@explaining_calls
def evaluate(
    model: Model,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    policies: Policy | str | Iterable[Policy | str],
    budgets: float | Iterable[float] = 128,
    tasks: Task | str | Iterable[Task | str] = "niah",
    limit: int | None = None,
    schedule: str | None = None,
    block: float | None = None,
    decode: str | None = None,
    compress: str = "prompt",
    divergence: bool = False,
    seed: int = 0,
    batch: int | None = None,
    dtype: str = "auto",
    device: str = "auto",
    out: str | Path | None = None,
    config_dir: str | Path | None = None,
    **fields: Unpack[Fields],
) -> Results:
    """Run every task with every policy at every budget, as the command line does: each example is audited.

    model: an object with its `tokenizer`, or a name: of conf/model, of a folder, of the Hub. policies, tasks: names, or
    objects, which have their own budget, schedule and other fields. divergence: compare every policy with the full
    cache, token by token, instead of scoring answers (the field of a task). budgets: tokens per KV head per layer on
    average, or below 1 a share of the prompt. batch: maximum number of sequences in a batch (`engine.rows`); None: as
    memory allows, 1: unbatched, with timings. out: the folder of the runs, which are continued there; the results have
    the first `limit` examples, a run keeps the others. None: a temporary folder, removed with the results. fields: any
    other field of the command line: `**{"policy.scorer.window": 16}`. Raises ValueError for a wrong value, if possible
    before anything is computed. The first error of a run is raised after all other runs have ended.
    """
    given = _given(model, tokenizer, dtype, device)
    temporary = TemporaryDirectory(prefix="kvbench-") if out is None else None
    settings: dict[str, Any] = {
        "schedule": schedule,
        "block": block,
        "decode": decode,
        "compress": compress,
        "limit": limit,
        "seed": seed,
        "engine.rows": batch,
        "dtype": dtype,
        "device": device if given is None else str(given.model.device),
        "out": str(out) if temporary is None else f"{temporary.name}/kvbench",
        **fields,
    }
    _check_names(fields)
    lists = [_listed("tasks", tasks, Task), _listed("policies", policies, Policy), _listed("budgets", budgets, Real)]
    folders = own_folders(config_dir)
    called: str | Path = given_name(model) if isinstance(model, PreTrainedModel) else model
    configs = []
    for task, policy, budget in product(*lists):
        own, more = _compared(task, divergence)
        configs.append(run_config(called, policy, own, folders, given, **{**settings, **more, "budget": budget}))
    runs = [build_run(config) for config in configs]
    for run in runs if temporary is None else ():
        check_files([run.identity["policy"], run.identity["task"]])
    _compute(runs, given)
    rows = [read_result(run.folder, run.limit, whole=temporary is not None) for run in runs]
    return Results(rows, runs[0].out, in_order=False, owned=temporary)


def _compared(task: Task | str, divergence: bool) -> tuple[Task | str, dict[str, Any]]:
    """The task with `divergence`, and the settings of a run for it."""
    if not divergence:
        return task, {}
    return (task, {"task.divergence": True}) if isinstance(task, str) else (replace(task, divergence=True), {})


def _check_names(fields: Iterable[str]) -> None:
    """Raise UsageError for the name of an argument in the singular."""
    for name in fields:
        if name in _PLURAL:
            raise UsageError(f"{name}= is not allowed, write {_PLURAL[name]}=")


def _compute(runs: Sequence[Run], given: GivenModel | None) -> None:
    """Compute all runs, and then raise the first error of one."""
    with nullcontext() if given is None else borrowed(given.model):
        errors = compute_runs(runs)
    for error in errors:
        if error is not None:
            raise error


def _given(model: Model, tokenizer: PreTrainedTokenizerBase | None, dtype: str, device: str) -> GivenModel | None:
    """The model if it is an object; None for a name. Raises UsageError."""
    if not isinstance(model, PreTrainedModel | str | Path):
        raise UsageError(f"model= must be a name or a model of transformers, got {a_kind(type(model))}")
    if not isinstance(model, PreTrainedModel):
        if tokenizer is not None:
            raise UsageError(f"tokenizer= is for a model object: model={model} has its own")
        return None
    if not isinstance(tokenizer, PreTrainedTokenizerBase | None):
        raise UsageError(f"tokenizer= must be a tokenizer of transformers, got {a_kind(type(tokenizer))}")
    if tokenizer is None:
        raise UsageError(f"tokenizer= is missing: {given_name(model)} is a model object")
    if (dtype, device) != ("auto", "auto"):
        raise UsageError(f"dtype={dtype} device={device} is for names: a model object is loaded already")
    return given_model(model, tokenizer)


def _listed(name: str, items: object, kind: type) -> Sequence[Any]:
    """One item, or several; names in one text are separated by commas, "full,snapkv"."""
    found = items.split(",") if isinstance(items, str) else list(items) if isinstance(items, Iterable) else [items]
    wanted = "a number" if kind is Real else f"a name or a {kind.__name__}"
    for item in found:
        if not isinstance(item, kind) and (kind is Real or not isinstance(item, str)):
            raise ConfigError(name, item if isinstance(item, str) else type(item), wanted)
    if not found:
        raise UsageError(f"{name}=[] is not allowed, it must name at least one")
    return found
