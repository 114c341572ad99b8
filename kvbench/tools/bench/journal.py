"""Cells of a benchmark and the file that remembers them: one JSON line each, written before the next one starts.

A cell that did not fit is a result too. The same command goes on where the last one stopped; cells that failed, or in
which the process ended, are tried again after all others: on a machine that is lent for minutes one of them must not
take the time of the rest.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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
LONGEST = 240.0  # seconds of most cells on a GPU: longer takes only one that hangs
TWICE = 2  # times that a cell may hang until it is not begun again
AGAIN = 75  # exit code: cells are left, the same command goes on


class DeviceLost(Exception):  # noqa: N818 - a state, as StopIteration is
    """No call reaches the device from this process any more, as after an illegal access to its memory."""


@dataclass(frozen=True)
class Cell:
    """One thing to measure. key: its name in the file; run: measures it; foreign: its code is not ours, so that what it
    raises is noted instead of ending the benchmark; bigger_than: key of a cell that must fit if this one is to;
    longest: seconds on a GPU after which it must be hanging.
    """

    key: str
    run: Callable[[], Record]
    foreign: bool = False
    bigger_than: str | None = None
    longest: float = LONGEST


class Journal:
    """The cells of one benchmark, in `path`: a line with its name where one begins, one with its record where it ends.

    cells: the last record of each. mistakes: keys of our own cells that failed now.
    """

    def __init__(self, path: Path, identity: Record) -> None:
        """identity: what all cells of a file share. UsageError where the file belongs to another benchmark."""
        self._path, self._identity = path, json.loads(json.dumps(identity))
        self.cells: dict[str, Record] = {}
        self._tried: set[str] = set()
        self._hung: Counter[str] = Counter()
        self.mistakes: list[str] = []
        if path.exists():
            self._read()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._append({"identity": self._identity})

    def _read(self) -> None:
        text = self._path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]  # a killed process may leave a part of a line
        if whole != text:
            self._path.write_bytes(whole)
        lines = [json.loads(line) for line in whole.splitlines()]
        if not lines:
            self._append({"identity": self._identity})
            return
        other = lines[0]["identity"]
        for field, value in self._identity.items():
            if other.get(field) != value:
                raise UsageError(
                    f"{self._path} holds cells with {field}={other.get(field)!r}, this benchmark has {value!r}: "
                    "choose another folder with out=, or remove that file"
                )
        self._tried = {line["cell"] for line in lines[1:]}
        self._hung = Counter(line["cell"] for line in lines[1:] if "hung" in line)
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
        todo = self._in_order(cells)
        for done, cell in enumerate(progress(todo, "cells", len(todo))):
            if seconds is not None and time.monotonic() - began > seconds:
                return [left.key for left in todo[done:]]
            self._append({"cell": cell.key})  # all that is left of one in which the process ends
            with self._watched(cell, device):
                result = self._run(cell, device)
            self._note(cell, result, device)
            if "failed" in result and lost(device):
                raise DeviceLost(f"the device is lost to this process after {cell.key!r} ({result['failed']})")
        return []

    def _in_order(self, cells: Iterable[Cell]) -> list[Cell]:
        """What is to be measured: cells never tried, then those that failed or in which a process ended."""
        todo = [cell for cell in cells if "failed" in self.cells.get(cell.key, {"failed": "not yet"})]
        self.mistakes += [f"{cell.key} (hung {TWICE} times)" for cell in todo if self._hung[cell.key] >= TWICE]
        return sorted((cell for cell in todo if self._hung[cell.key] < TWICE), key=lambda cell: cell.key in self._tried)

    @contextmanager
    def _watched(self, cell: Cell, device: torch.device) -> Iterator[None]:
        """End this process where a cell on a GPU takes longer than it may: nothing else stops a kernel that hangs."""

        def end() -> None:
            self._append({"cell": cell.key, "hung": True})
            said = f"{cell.key} took more than {cell.longest:g} s and was ended: the same command goes on"
            sys.stderr.write(f"kvbench: {said}\n")
            sys.stderr.flush()
            os._exit(AGAIN)

        watch = threading.Timer(cell.longest, end)
        watch.daemon = True
        if device.type == "cuda":
            watch.start()
        try:
            yield
        finally:
            watch.cancel()

    def _run(self, cell: Cell, device: torch.device) -> Record:
        smaller = self.cells.get(cell.bigger_than or "")
        if smaller is not None and smaller.get("out_of_memory"):
            return {"out_of_memory": f"not tried: {cell.bigger_than} did not fit"}
        began = time.monotonic()
        try:
            result = attempt(cell)
        except UsageError:
            raise
        except Exception as error:
            traceback.print_exc()
            result = {"failed": _said(error)}
            self.mistakes.append(cell.key)
        if not ("failed" in result and lost(device)):
            release(device)
        return result | {"seconds": round(time.monotonic() - began, 2)}

    def _note(self, cell: Cell, result: Record, device: torch.device) -> None:
        now = {"copy_bytes_per_s": bandwidth(device), "machine": momentary(device)}
        record = {"cell": cell.key, **result, "revision": revision(), **now}
        self._append(record)
        self.cells[cell.key] = record


def attempt(cell: Cell) -> Record:
    """What a cell measures; where memory did not suffice, which is what it measured, the sentence that said so.

    What foreign code raises is noted; what ours raises, is raised.
    """
    try:
        return cell.run()
    except torch.OutOfMemoryError as error:
        return {"out_of_memory": _first_line(error)}
    except Exception as error:
        if isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY):
            return {"out_of_memory": _first_line(error)}
        if not cell.foreign:
            raise
        return {"failed": _said(error)}


def why_not(record: Record) -> str:
    """Why a cell has no figure."""
    if "out_of_memory" in record:
        return f"out of memory: {record['out_of_memory']}"
    return f"failed: {record['failed']}"


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
