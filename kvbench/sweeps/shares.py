"""A sweep cut into shares, one for each worker or job: what shares a prefill stays together as far as it can."""

from __future__ import annotations

import itertools
import json
import math
import uuid
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from kvbench.runs.cell_state import SWEEP_FOLDER
from kvbench.runs.definition import Entry
from kvbench.runs.files import write_json
from kvbench.terminal.errors import UsageError


def groups(entries: Sequence[Entry]) -> list[list[Entry]]:
    """The cells that share model, task and generation, together; in the order of the sweep."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.group, []).append(entry)
    return list(found.values())


def cut(entries: Sequence[Entry], shares: int | None) -> list[list[Entry]]:
    """Cells in `shares` parts of about equal size (None: one for each group), none of them empty.

    Few shares take whole groups, the largest first; of many, the largest groups are cut.
    """
    whole = groups(entries)
    if shares is None or shares == len(whole):
        return whole
    if shares < len(whole):
        found: list[list[Entry]] = [[] for _ in range(shares)]
        for group in sorted(whole, key=len, reverse=True):
            min(found, key=len).extend(group)
        return found
    parts = [1] * len(whole)
    for _ in range(min(shares, len(entries)) - len(whole)):
        largest = max(range(len(whole)), key=lambda i: len(whole[i]) / parts[i])
        parts[largest] += 1
    return [piece for group, n in zip(whole, parts, strict=True) for piece in _pieces(group, n)]


def _pieces(group: Sequence[Entry], n: int) -> list[list[Entry]]:
    """A group in n parts, one after the other, whose sizes differ by at most one."""
    ends = [math.floor(len(group) * i / n) for i in range(n + 1)]
    return [list(group[start:end]) for start, end in itertools.pairwise(ends)]


def new_stamp() -> str:
    """A name for the shares of one launch, sorted by time: 20261122-051500-1f3a."""
    return f"{datetime.now():%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:4]}"


def share_path(out: Path, name: str) -> Path:
    """Where a share lies."""
    return out / SWEEP_FOLDER / "shares" / f"{name}.json"


def write_share(out: Path, name: str, entries: Sequence[Entry], gpus: int = 0) -> None:
    """Keep the cells of a share, by their keys. gpus: how many were asked for."""
    path = share_path(out, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"cells": [entry.key for entry in entries], "gpus": gpus})


def read_share(out: Path, name: str) -> tuple[list[str], int]:
    """The keys of a share's cells, and the GPUs asked for. Raises UsageError."""
    try:
        values = json.loads(share_path(out, name).read_text(encoding="utf-8"))
        return list(values["cells"]), int(values["gpus"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{share_path(out, name)} cannot be read ({type(error).__name__})") from error
