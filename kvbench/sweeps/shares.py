"""A sweep cut into shares, one for each worker or job: what shares a prefill stays together as far as it can."""

from __future__ import annotations

import itertools
import json
import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from kvbench.policies.checks import whole_number
from kvbench.records.definition import SWEEP_FOLDER, Entry
from kvbench.records.files import write_json
from kvbench.records.shards import Shard
from kvbench.terminal.errors import UsageError

MOST_SHARDS = 1000


@dataclass(frozen=True)
class Piece:
    """What is dealt to shares: a cell, or one shard of its examples."""

    entry: Entry
    shard: Shard | None = None

    @property
    def group(self) -> tuple[str, Shard | None]:
        """What pieces must have in common to be computed from the same prefills."""
        return self.entry.group, self.shard


def pieces(entries: Sequence[Entry], shards: int) -> list[Piece]:
    """All cells, each in so many shards, or as many as its limit has examples."""
    found = []
    for entry in entries:
        of = shards if entry.limit is None else min(shards, entry.limit)
        found += [Piece(entry, Shard(number, of) if of > 1 else None) for number in range(1, of + 1)]
    return found


def groups(asked: Sequence[Piece]) -> list[list[Piece]]:
    """The pieces that share model, task, generation and examples, together; in the order of the sweep."""
    found: dict[tuple[str, Shard | None], list[Piece]] = {}
    for piece in asked:
        found.setdefault(piece.group, []).append(piece)
    return list(found.values())


def cut(asked: Sequence[Piece], shares: int | None) -> list[list[Piece]]:
    """Pieces in `shares` parts of about equal size (None: one for each group), none of them empty.

    Few shares take whole groups, the largest first; of many, the largest groups are cut.
    """
    whole = groups(asked)
    if shares is None or shares == len(whole):
        return whole
    if shares < len(whole):
        found: list[list[Piece]] = [[] for _ in range(shares)]
        for group in sorted(whole, key=len, reverse=True):
            min(found, key=len).extend(group)
        return found
    parts = [1] * len(whole)
    for _ in range(min(shares, len(asked)) - len(whole)):
        largest = max(range(len(whole)), key=lambda i: len(whole[i]) / parts[i])
        parts[largest] += 1
    return [part for group, n in zip(whole, parts, strict=True) for part in _parts(group, n)]


def _parts(group: Sequence[Piece], n: int) -> list[list[Piece]]:
    """A group in n parts, one after the other, whose sizes differ by at most one."""
    ends = [math.floor(len(group) * i / n) for i in range(n + 1)]
    return [list(group[start:end]) for start, end in itertools.pairwise(ends)]


def check_shards(shards: int) -> None:
    """Raise ValueError where `launcher.shards` is no number of shards."""
    whole_number("launcher.shards", shards, 1)
    if shards > MOST_SHARDS:
        raise ValueError(f"launcher.shards={shards} is too many, at most {MOST_SHARDS} are allowed")


def new_stamp() -> str:
    """A name for the shares of one launch, with its time (UTC): 20261122-051500-1f3a."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:4]}"


def share_path(out: Path, name: str) -> Path:
    """Where a share lies."""
    return out / SWEEP_FOLDER / "shares" / f"{name}.json"


def write_share(out: Path, name: str, share: Sequence[Piece], gpus: int = 0) -> None:
    """Keep what a share is made of. gpus: how many were asked for."""
    path = share_path(out, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    cells = [[piece.entry.key, None if piece.shard is None else str(piece.shard)] for piece in share]
    write_json(path, {"cells": cells, "gpus": gpus})


def read_share(out: Path, name: str) -> tuple[list[tuple[str, Shard | None]], int]:
    """The keys of a share's cells, each with the shard it is about, and the GPUs asked for. Raises UsageError."""
    try:
        values = json.loads(share_path(out, name).read_text(encoding="utf-8"))
        cells = [(str(key), None if shard is None else Shard.named(shard)) for key, shard in values["cells"]]
        return cells, int(values["gpus"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{share_path(out, name)} cannot be read ({type(error).__name__})") from error
