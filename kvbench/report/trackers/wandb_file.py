"""How far W&B's own files of an offline run reach: after a kill they say what was logged, and nothing else does.

A `.wandb` file is LevelDB's log: a header, then blocks in which each piece of a record stands behind its checksum,
length and kind (github.com/google/leveldb, doc/log_format.md; W&B's header has 7 bytes). A record is a `Record` of
W&B's, whose messages are part of its package.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]  # made when it is imported

_HEADER, _BLOCK, _PIECE = 7, 32768, 7
_WHOLE, _LAST = 1, 4  # kinds of pieces that end a record; 2 and 3 begin and continue one


def steps_logged(folder: Path, run_id: str, project: str) -> int | None:
    """How many steps of a run the offline files in `folder` hold, of one begun anew again; None without such a file."""
    paths = sorted(folder.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb"))
    found = [steps for path in paths if (steps := _steps(path, project)) is not None]
    return max(found, default=None)


def _steps(path: Path, project: str) -> int | None:
    """One more than the last step of a file; 0 where it holds none yet, None where it is another project's."""
    steps = 0
    for content in _records(path.read_bytes()):
        record = Record.FromString(content)
        if record.HasField("run") and record.run.project != project:
            return None
        for item in record.history.item:
            if item.key == "_step" or list(item.nested_key) == ["_step"]:
                steps = max(steps, int(json.loads(item.value_json)) + 1)
    return steps


def _records(content: bytes) -> Iterator[bytes]:
    """The whole records of a file; what a kill cut off at its end is left out."""
    at, record = _HEADER, b""
    while at + _PIECE <= len(content):
        room = _BLOCK - at % _BLOCK
        if room < _PIECE:  # the end of a block is filled up
            at += room
            continue
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        end = at + _PIECE + size
        if kind == 0 or end > len(content):
            return
        record += content[at + _PIECE : end]
        at = end
        if kind in (_WHOLE, _LAST):
            yield record
            record = b""
