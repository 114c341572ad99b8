"""Cells of a benchmark and the file that remembers them: one JSON line each, written before the next one starts.

A cell that did not fit is a result too. The same command goes on where the last one stopped; cells that failed, or in
which the process ended, are tried again after all others: on a machine that is lent for minutes one of them must not
take the time of the rest. What ends a process whose kernel hangs is `timeout` of coreutils, as in scripts/gpu_day.sh.
"""

from __future__ import annotations

import json
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvbench.terminal.bars import progress
from kvbench.terminal.errors import UsageError
from kvbench.tools.bench.machine import bandwidth, lost, momentary, release, revision

Record = dict[str, Any]
NO_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "Storage size calculation overflowed",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
AGAIN = 75  # exit code: cells are left, the same command goes on


class DeviceLost(Exception):  # noqa: N818 - a state, as StopIteration is
    """No call reaches the device from this process any more, as after an illegal access to its memory.

    again: the cell that lost it had been begun before, so that no other one is left for the next process.
    """

    def __init__(self, sentence: str, again: bool) -> None:
        super().__init__(sentence)
        self.again = again


@dataclass(frozen=True)
class Cell:
    """One thing to measure. key: its name in the file; run: measures it; foreign: its code is not ours, so that its
    failure is no mistake; bigger_than: key of a cell that must fit if this one is to.
    """

    key: str
    run: Callable[[], Record]
    foreign: bool = False
    bigger_than: str | None = None


class Journal:
    """The cells of one benchmark, in `path`: a line with its name where one begins, one with its record where it ends.

    cells: the last record of each. mistakes: keys of our own cells that failed now.
    """

    def __init__(self, path: Path, identity: Record) -> None:
        """identity: what all cells of a file share. UsageError where the file belongs to another benchmark."""
        self._path = path
        self.cells: dict[str, Record] = {}
        self.mistakes: list[str] = []
        self._tried = Counter[str]()
        identity, lines = json.loads(json.dumps(identity)), _whole_lines(path)
        if not lines:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._append({"identity": identity})
            return
        for field, value in identity.items():
            if (other := lines[0]["identity"].get(field)) != value:
                raise UsageError(
                    f"{path} holds cells with {field}={other!r}, this benchmark has {value!r}: "
                    "choose another folder with out=, or remove that file"
                )
        self._tried = Counter(line["cell"] for line in lines[1:])
        self.cells = {line["cell"]: line for line in lines[1:] if "revision" in line}

    def _append(self, record: Record) -> None:
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record, allow_nan=False) + "\n")

    def measure(self, cells: Iterable[Cell], device: torch.device, seconds: float | None = None) -> list[str]:
        """Run the cells that are not in the file; returns the keys of those left when `seconds` were over.

        A cell of ours that fails is noted with what it said, its traceback goes to stderr, and the next one begins.
        Raises DeviceLost where none can.
        """
        began = time.monotonic()
        todo = [cell for cell in cells if "failed" in self.cells.get(cell.key, {"failed": "not yet"})]
        todo.sort(key=lambda cell: self._tried[cell.key])
        for done, cell in enumerate(progress(todo, "cells", len(todo))):
            if seconds is not None and time.monotonic() - began > seconds:
                return [left.key for left in todo[done:]]
            self._append({"cell": cell.key})  # all that is left of one in which the process ends
            record = self._run(cell)
            self._note(cell, record, device)
            if "failed" in record and lost(device):
                sentence = f"the device is lost to this process after {cell.key!r} ({record['failed']})"
                raise DeviceLost(sentence, cell.key in self._tried)
            release(device)
        return []

    def _run(self, cell: Cell) -> Record:
        smaller = self.cells.get(cell.bigger_than or "")
        if smaller is not None and smaller.get("out_of_memory"):
            return {"out_of_memory": f"not tried: {cell.bigger_than} did not fit"}
        began = time.monotonic()
        record = attempt(cell)
        if "failed" in record and not cell.foreign:
            self.mistakes.append(cell.key)
        return record | {"seconds": round(time.monotonic() - began, 2)}

    def _note(self, cell: Cell, record: Record, device: torch.device) -> None:
        now = {"copy_bytes_per_s": bandwidth(device), "machine": momentary(device)}
        self.cells[cell.key] = {"cell": cell.key, **record, "revision": revision(), **now}
        self._append(self.cells[cell.key])


def _whole_lines(path: Path) -> list[Record]:
    """The lines of a journal; what a killed process wrote of one is cut off."""
    text = path.read_bytes() if path.exists() else b""
    whole = text[: text.rfind(b"\n") + 1]
    if whole != text:
        path.write_bytes(whole)
    return [json.loads(line) for line in whole.splitlines()]


def attempt(cell: Cell) -> Record:
    """What a cell measures, or the sentence of what was raised; too little memory is a result, no failure."""
    try:
        return cell.run()
    except UsageError:
        raise
    except Exception as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        if isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY):
            return {"out_of_memory": said}
        if not cell.foreign:
            traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {said}"}


def why_not(record: Record) -> str:
    """Why a cell has no figure."""
    if "out_of_memory" in record:
        return f"out of memory: {record['out_of_memory']}"
    return f"failed: {record['failed']}"
