"""`kvbench.evaluate`: policies, budgets and tasks on one model, as `python -m kvbench -m` runs them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvbench.analysis.load import read_result
from kvbench.api.asked import Asked, Model
from kvbench.api.results import Results
from kvbench.engine.run import run_cells
from kvbench.errors import UsageError
from kvbench.identity.cell import Cell
from kvbench.models.given import borrowed, given_model, given_name
from kvbench.models.loading import GivenModel
from kvbench.policies.policy import Policy
from kvbench.records.retries import drop_failed
from kvbench.sweeps.plan import plan
from kvbench.tasks.task import Task


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
    seed: int = 0,
    batch: int | None = None,
    dtype: str = "auto",
    device: str = "auto",
    out: str | Path | None = None,
    config_dir: str | Path | None = None,
    **fields: Any,  # noqa: ANN401 - whatever a part of a run has
) -> Results:
    """Run every task with every policy at every budget, as the command line would: each example is audited.

    model: an object with its `tokenizer`, or a name: of conf/model, of a folder, of the hub. policies, tasks: names, or
    objects, which have their budget, schedule and other fields already. budgets: tokens per KV head per layer on
    average, or below 1 a share of the prompt. batch: most sequences decoded together, `engine.rows` of the command
    line; None: as memory allows, 1: one by one, timed. out: the folder that keeps the runs, and from which they are
    continued; None: nothing is kept but what is returned. fields: any other of the command line by its name there:
    `max_new_tokens=20`, `**{"policy.scorer.window": 16}`.
    Raises ValueError for a wrong value, before anything is computed where that can be known then; else after all other
    runs have ended.
    """
    given = _given(model, tokenizer, dtype, device)
    temporary = TemporaryDirectory(prefix="kvbench-") if out is None else None
    into = out if temporary is None else f"{temporary.name}/kvbench"
    settings = {"schedule": schedule, "block": block, "decode": decode, "compress": compress, "limit": limit}
    settings |= {"seed": seed, "engine.rows": batch, "dtype": dtype, "out": str(into)}
    settings |= {"device": device if given is None else str(given.model.device)}
    asked = Asked(
        model,
        tasks=_listed(tasks),
        policies=_listed(policies),
        budgets=_listed(budgets),
        settings={name: value for name, value in settings.items() if value is not None} | fields,
        config_dir=config_dir,
        kept=temporary is None,
    )
    cells = [one.cell for one in plan(asked.combinations(), strict=True, given=given) if one.cell is not None]
    with nullcontext() if given is None else borrowed(given.model):
        rows = [read_result(cell.folder, cell.limit) for cell in _computed(cells)]
    return Results(rows, cells[0].out, in_order=False, held=temporary)


def _given(model: Model, tokenizer: PreTrainedTokenizerBase | None, dtype: str, device: str) -> GivenModel | None:
    """The model where it is an object; None for a name. Raises UsageError."""
    if not isinstance(model, PreTrainedModel | str | Path):
        raise UsageError(f"model= must be a name or a model of transformers, got a {type(model).__name__}")
    if not isinstance(model, PreTrainedModel):
        if tokenizer is not None:
            raise UsageError(f"tokenizer= is for a model object: model={model} has its own")
        return None
    if tokenizer is None:
        raise UsageError(f"tokenizer= is missing: {given_name(model)} is a model object")
    if (dtype, device) != ("auto", "auto"):
        raise UsageError(f"dtype={dtype} device={device} is for names: a model object is loaded already")
    return given_model(model, tokenizer)


def _listed(items: object) -> list[Any]:
    """One item, or several; names in one text as on the command line, "full,snapkv"."""
    if isinstance(items, str):
        return items.split(",")
    return list(items) if isinstance(items, Iterable) else [items]


def _computed(cells: Sequence[Cell]) -> Sequence[Cell]:
    """The cells, once what was missing of each is computed. Raises the first error of those that fail."""
    for cell in cells:
        drop_failed(cell.folder)
    endings = run_cells(cells)
    error = next((ending.error for ending in endings if ending.error is not None), None)
    if error is not None:
        raise error
    return cells
