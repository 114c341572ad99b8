"""From a command line to cells: each one built and checked before anything is computed, equal ones only once."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvbench.config.compose import Combination
from kvbench.identity.cell import Cell, build_cell
from kvbench.models.loading import GivenModel
from kvbench.records.definition import Entry
from kvbench.records.shards import Shard
from kvbench.sweeps.outcome import Told, explain
from kvbench.terminal.errors import UsageError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Planned:
    """A cell of a sweep: what is kept of it on disk, and, where its values are right, what is computed."""

    entry: Entry
    cell: Cell | None = None


def plan(
    combinations: Sequence[Combination],
    *,
    elsewhere: bool = False,
    strict: bool = False,
    given: GivenModel | None = None,
) -> list[Planned]:
    """All cells, each once, in the order asked for; one with a wrong value is told and keeps its error.

    elsewhere: they will be computed on other machines, so that this one need not have their devices. given: a model
    object that all of them use. A wrong value in a single combination, or in any where `strict`, raises UsageError.
    """
    found: dict[str, Planned] = {}
    told = Told()
    for combination in combinations:
        planned = _plan(combination, elsewhere, told, strict or len(combinations) == 1, given)
        before = found.get(planned.entry.key)
        found[planned.entry.key] = planned if before is None else _longer(before, planned)
    told.rest()
    _tell_ignored(combinations, list(found.values()))
    _check_decode(combinations, list(found.values()))
    return list(found.values())


def _tell_ignored(combinations: Sequence[Combination], planned: Sequence[Planned]) -> None:
    """Say where budgets were given, but for none of the cells: beside others, `full` is given one by every sweep."""
    given = [c.config["budget"] for c in combinations if c.config["budget"] != c.preset["budget"]]
    if given and all(p.cell is not None and p.cell.budget is None for p in planned):
        names = ", ".join(dict.fromkeys(p.entry.policy for p in planned))
        sets = any(p.cell is not None and p.cell.policy.evicts for p in planned)
        why = "sets its own" if sets else "keeps every token"
        log.warning("budget=%s is ignored: %s %s", ",".join(map(str, dict.fromkeys(given))), names, why)


def _check_decode(combinations: Sequence[Combination], planned: Sequence[Planned]) -> None:
    """UsageError where decoding is to evict, but no policy evicts: beside others, `full` is told so by every sweep."""
    if any(c.config["decode"] != "evict" for c in combinations):
        return
    if all(p.cell is not None and not p.cell.policy.evicts for p in planned):
        names = ", ".join(dict.fromkeys(p.entry.policy for p in planned))
        raise UsageError(f"decode=evict is not allowed for {names}, which keeps every token: leave decode= out")


def _plan(asked: Combination, elsewhere: bool, told: Told, strict: bool, given: GivenModel | None) -> Planned:
    """The cell of a combination, or what is wrong with it, which then was told."""
    config = {key: value for key, value in asked.config.items() if key != "launcher"}  # how a run was scheduled
    entry = Entry(asked.title, asked.choices["model"], asked.choices["policy"], asked.choices["task"], None, config)
    try:
        here = _for_here(config) if elsewhere else config
        cell = build_cell(here, entry.policy, entry.model, asked.preset, given)
    except UsageError as error:
        if strict:
            raise
        code, sentence = explain(error)
        told.tell(entry.title, sentence, error if config["debug"] is True else None)
        return Planned(replace(entry, error=sentence, code=code))
    checked = replace(entry, limit=cell.limit, run_id=cell.run_id, changed=cell.changed, identity=cell.identity)
    return Planned(checked, cell)


def rebuilt(entry: Entry, out: Path, elsewhere: bool = False, shard: Shard | None = None) -> Planned:
    """The cell of an entry that was read from `out`, or a shard of it.

    Raises UsageError where it is no longer the same cell.
    """
    config = {**entry.config, "out": str(out)}
    cell = build_cell(_for_here(config) if elsewhere else config, entry.policy, entry.model)
    cell = replace(cell, changed=entry.changed, config=entry.config, shard=shard)
    if cell.run_id != entry.run_id:
        raise UsageError(
            f"{entry.run_id} would now be {cell.run_id}: its code, model or a file its policy reads changed since the "
            "sweep was begun, run its command again"
        )
    return Planned(entry, cell)


def _for_here(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without what only the machine that computes must have."""
    return {**config, "device": "auto", "engine": {**config["engine"], "cuda_graph": False}}


def _longer(one: Planned, other: Planned) -> Planned:
    """Of the same cell twice the one with more examples, in the place of the first."""
    ours, theirs = one.entry.limit, other.entry.limit
    return other if ours is not None and (theirs is None or theirs > ours) else one
