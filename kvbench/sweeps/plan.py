"""The runs of a sweep: each one built and checked before anything is computed, equal ones only once."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvbench.errors import UsageError
from kvbench.results.definition import Entry
from kvbench.run.run import Run, build_cell
from kvbench.run.run_config import RunConfig, typed
from kvbench.sweeps.outcome import Messages

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Asked:
    """One job of a sweep. title: what distinguishes it from the others. choices: the chosen name of each group."""

    title: str
    config: Mapping[str, Any]
    choices: Mapping[str, str]
    folders: Sequence[Path] = ()


@dataclass(frozen=True)
class Planned:
    """A run: what is kept of it on disk, and, if its values are right, what is computed."""

    entry: Entry
    cell: Run | None = None


def plan(asked: Sequence[Asked], elsewhere: bool = False) -> tuple[list[Planned], list[str]]:
    """All runs, each once, in order, and the key of the run of each job.

    elsewhere: they will be computed on other machines, so this one need not have their devices. A wrong value is
    printed and kept as the error of its run; UsageError if there is only one job.
    """
    found: dict[str, Planned] = {}
    keys = []
    messages = Messages()
    for one in asked:
        planned = _plan(one, elsewhere, messages if len(asked) > 1 else None)
        key = planned.entry.key
        keys.append(key)
        found[key] = _longer(found[key], planned) if key in found else planned
    messages.print_counts()
    runs = list(found.values())
    _check_decode(asked, runs)
    return runs, keys


def _plan(one: Asked, elsewhere: bool, messages: Messages | None) -> Planned:
    entry = Entry(one.title, one.choices["model"], one.choices["policy"], one.choices["task"], None, dict(one.config))
    try:
        run = typed(one.config, one.choices, one.folders)
        cell = build_cell(_anywhere(run) if elsewhere else run)
    except UsageError as error:
        if messages is None:
            raise
        messages.print(one.title, str(error))
        return Planned(replace(entry, error=str(error)))
    if cell.budget is None and "budget=" in one.title and messages is None:
        log.warning("budget=%s is ignored: %s keeps every token or sets its own", run.budget, entry.policy)
    return Planned(
        replace(entry, limit=cell.limit, run_id=cell.run_id, changed=cell.changed, identity=cell.identity), cell
    )


def rebuilt(entry: Entry, out: Path) -> Planned:
    """The run of an entry read from `out`. Raises UsageError if it is no longer the same run."""
    chosen = {"model": entry.model, "policy": entry.policy, "task": entry.task}
    cell = build_cell(typed({**entry.config, "out": str(out)}, chosen))
    if cell.run_id != entry.run_id:
        raise UsageError(
            f"{entry.run_id} would now be {cell.run_id}: its code, model or a file it reads changed since the sweep "
            "was begun; run its command again"
        )
    return Planned(entry, replace(cell, changed=entry.changed, config=entry.config))


def _anywhere(run: RunConfig) -> RunConfig:
    """The run without settings that only the machine that computes it must support."""
    return replace(run, device="auto", engine=replace(run.engine, cuda_graph=False))


def _check_decode(asked: Sequence[Asked], runs: Sequence[Planned]) -> None:
    """UsageError if decoding is to evict but no policy evicts; beside other policies, `full` gets the same fields."""
    keeps = all(run.cell is not None and not run.cell.policy.evicts for run in runs)
    if keeps and all(one.config.get("decode") == "evict" for one in asked):
        names = ", ".join(dict.fromkeys(run.entry.policy for run in runs))
        raise UsageError(f"decode=evict is not allowed for {names}, which keeps every token: leave decode= out")


def _longer(one: Planned, other: Planned) -> Planned:
    """Of the same run twice the one with more examples."""
    ours, theirs = one.entry.limit, other.entry.limit
    return other if ours is not None and (theirs is None or theirs > ours) else one
