"""Cells that a sweep defines and that have no finished run: a table that left them out would hide what failed."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

from kvbench.records.cell_state import failure, read_states
from kvbench.records.definition import FILE_NAME, Entry, read_definition
from kvbench.terminal.errors import UsageError

log = logging.getLogger(__name__)


def missing_rows(folder: Path, finished: Collection[str]) -> list[dict[str, Any]]:
    """A row of the tidy table for each cell of the sweeps below `folder` whose run is not among `finished`."""
    rows = []
    for path in sorted(folder.rglob(FILE_NAME)):
        try:
            entries = read_definition(path.parent).cells
        except UsageError as error:
            log.warning("%s", error)
            continue
        rows += [_row(path.parent, entry) for entry in entries if entry.run_id not in finished]
    if rows:
        log.warning("%d cells have no finished run: column state says why", len(rows))
    return rows


def _row(out: Path, entry: Entry) -> dict[str, Any]:
    budget = entry.budget if isinstance(entry.budget, int | float) else None
    known = {} if entry.identity is None else {"seed": entry.identity["seed"], "dtype": entry.identity["dtype"]}
    fields = (
        {} if entry.identity is None else {f"{x}_fields": json.dumps(entry.identity[x]) for x in ("policy", "task")}
    )
    named = {"run_id": entry.run_id, "model": entry.model, "policy": entry.policy, "task": entry.task}
    named["compress"] = str(entry.config.get("compress", "prompt"))
    return {**named, **known, **fields, "budget": budget, "n": 0, "state": _state(out, entry)}


def _state(out: Path, entry: Entry) -> str:
    """Why there is no finished run, as far as the sweep's folder says."""
    if entry.run_id is None:
        return f"failed: {entry.error}"
    said = read_states(out, entry.run_id)
    failed = failure(said)
    if failed is not None:
        return f"failed: {failed.error}"
    return "not finished" if said else "not begun"
