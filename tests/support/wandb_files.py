"""What W&B's offline files hold: its own log of records, read back with its own messages.

A `.wandb` file is LevelDB's log: after a header of 7 bytes come blocks of 32 KiB, in them pieces of records, each with
7 bytes of its own (checksum, length, and whether it is the first, a middle, the last or the only piece).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2 as messages

BLOCK, HEADER = 32768, 7
FULL, LAST = 1, 4


@dataclass
class OfflineRun:
    """One run of W&B, as one process of ours left it."""

    folder: Path
    id: str = ""
    title: str = ""
    project: str = ""
    entity: str = ""
    group: str = ""
    job_type: str = ""
    tags: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None

    def column(self, name: str) -> list[Any]:
        """A number of all rows of the history."""
        return [row[name] for row in self.history]

    def table(self, name: str) -> list[dict[str, Any]]:
        """The rows of a table that the summary names."""
        content = json.loads((self.folder / "files" / self.summary[name]["path"]).read_text(encoding="utf-8"))
        return [dict(zip(content["columns"], row, strict=True)) for row in content["data"]]


def offline_runs(folder: Path) -> list[OfflineRun]:
    """All runs below a folder of W&B's, in the order of their beginning."""
    return [_read(path) for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"))]


def _read(path: Path) -> OfflineRun:
    run = OfflineRun(path.parent)
    for content in _records(path.read_bytes()):
        record = messages.Record.FromString(content)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            told = record.run
            run.id, run.title, run.group, run.job_type = told.run_id, told.display_name, told.run_group, told.job_type
            run.project, run.entity, run.tags = told.project, told.entity, tuple(told.tags)
            run.config |= {item.key: json.loads(item.value_json) for item in told.config.update}
        elif kind == "history":
            run.history.append(_nested(record.history.item))
        elif kind == "summary":
            run.summary |= _nested(record.summary.update)
        elif kind == "exit":
            run.exit_code = record.exit.exit_code
    return run


def _nested(items: Iterable[Any]) -> dict[str, Any]:
    """Values by key, those of a table or a picture together."""
    found: dict[str, Any] = {}
    for item in items:
        *above, last = list(item.nested_key) or [item.key]
        place = found
        for key in above:
            place = place.setdefault(key, {})
        place[last] = json.loads(item.value_json)
    return found


def _records(content: bytes) -> Iterator[bytes]:
    """The whole records; one that a kill cut off ends them."""
    assert content[:4] == b":W&B", "no file of W&B's"
    at, whole = HEADER, b""
    while at + HEADER <= len(content):
        left = BLOCK - at % BLOCK
        if left < HEADER:
            at += left
            continue
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        whole += content[at + HEADER : at + HEADER + size]
        at += HEADER + size
        if kind in (FULL, LAST):
            yield whole
            whole = b""
