"""Cells of a benchmark and the file that remembers them: one JSON line each, written before the next one starts.

A cell that did not fit is a result too. The same command goes on where the last one stopped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvbench.terminal.bars import progress
from kvbench.terminal.errors import UsageError
from kvbench.tools.bench.machine import momentary, release, revision

Record = dict[str, Any]
NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "Storage size calculation overflowed")


@dataclass(frozen=True)
class Cell:
    """One thing to measure. key: its name in the file; run: measures it; foreign: its code is not ours, so that what it
    raises is noted instead of ending the benchmark; bigger_than: key of a cell that must fit if this one is to.
    """

    key: str
    run: Callable[[], Record]
    foreign: bool = False
    bigger_than: str | None = None


class Journal:
    """The finished cells of one benchmark, in `path`."""

    def __init__(self, path: Path, identity: Record) -> None:
        """identity: what all cells of a file share. UsageError where the file belongs to another benchmark."""
        self._path, self._identity = path, json.loads(json.dumps(identity))
        self.cells: dict[str, Record] = {}
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
        self.cells = {line["cell"]: line for line in lines[1:]}

    def _append(self, record: Record) -> None:
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record, allow_nan=False) + "\n")

    def measure(self, cells: Iterable[Cell], device: torch.device, seconds: float | None = None) -> list[str]:
        """Run the cells that are not in the file; returns the keys of those left when `seconds` were over."""
        began = time.monotonic()
        todo = [cell for cell in cells if cell.key not in self.cells]
        for done, cell in enumerate(progress(todo, "cells", len(todo))):
            if seconds is not None and time.monotonic() - began > seconds:
                return [left.key for left in todo[done:]]
            self._note(cell, self._run(cell, device), device)
        return []

    def _run(self, cell: Cell, device: torch.device) -> Record:
        smaller = self.cells.get(cell.bigger_than or "")
        if smaller is not None and smaller.get("out_of_memory"):
            return {"out_of_memory": f"not tried: {cell.bigger_than} did not fit"}
        began = time.monotonic()
        result = attempt(cell)
        release(device)
        return result | {"seconds": round(time.monotonic() - began, 2)}

    def _note(self, cell: Cell, result: Record, device: torch.device) -> None:
        record = {"cell": cell.key, **result, "revision": revision(), "machine": momentary(device)}
        self._append(record)
        self.cells[cell.key] = record


def attempt(cell: Cell) -> Record:
    """What a cell measures; where memory did not suffice, which is what it measured, the sentence that said so."""
    try:
        return cell.run()
    except torch.OutOfMemoryError as error:
        return {"out_of_memory": _first_line(error)}
    except RuntimeError as error:
        if any(words in str(error) for words in NO_MEMORY):
            return {"out_of_memory": _first_line(error)}
        if not cell.foreign:
            raise
        return {"failed": _first_line(error)}
    except (ValueError, TypeError, KeyError, AttributeError, ImportError, AssertionError, NotImplementedError) as error:
        if not cell.foreign:
            raise
        return {"failed": f"{type(error).__name__}: {_first_line(error)}"}


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
