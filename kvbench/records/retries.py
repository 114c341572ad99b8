"""Removes failed examples from a run's files, so that they are computed again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

from kvbench.records.files import write_atomically
from kvbench.records.locks import RunBusyError, take
from kvbench.records.samples import FILE_NAME, read_samples
from kvbench.records.shards import SHARD_FILE, Shard, shard_folders

_FAILED = b'"error": "'


def drop_failed(folder: Path, every: bool = False) -> bool:
    """Remove the examples that ran out of memory, or `every` failed one; True if there was any.

    What stands behind the first of them in samples.jsonl goes into a shard, from which the run takes it in again. A run
    that somebody computes, or whose file is damaged, is left as it is.
    """
    paths = [shard / SHARD_FILE for shard in shard_folders(folder)] + [folder / FILE_NAME]
    return sum(_drop(path, every) for path in paths if path.exists() and _FAILED in path.read_bytes()) > 0


def _drop(path: Path, every: bool) -> bool:
    with suppress(RunBusyError, ValueError), closing(take(path.parent)):  # what is damaged is told by whoever goes on
        whole = path.name == FILE_NAME
        samples = read_samples(path, whole=whole)
        again = [sample.error is not None and (every or sample.ran_out_of_memory) for sample in samples]
        if not any(again):
            return False
        lines = path.read_bytes().splitlines(keepends=True)
        kept = [line for line, drop in zip(lines, again, strict=False) if not drop]
        if whole:
            first = again.index(True)
            _cut_behind(path, sum(map(len, lines[:first])), kept[first:])
        else:
            write_atomically(path, b"".join(kept).decode())
        return True
    return False


def _cut_behind(path: Path, end: int, kept: Sequence[bytes]) -> None:
    """First what stands behind is kept elsewhere, then it is cut off: a kill in between loses nothing."""
    behind = Shard(1, 1).folder(path.parent) / SHARD_FILE
    behind.parent.mkdir(exist_ok=True)
    before = behind.read_bytes() if behind.exists() else b""
    write_atomically(behind, (before + b"".join(kept)).decode())
    (path.parent / "metrics.json").unlink(missing_ok=True)
    os.truncate(path, end)
