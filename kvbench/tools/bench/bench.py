"""What the cells of a protocol share: settings, device, model, and the rows a protocol makes of what was measured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from kvbench.report.figures.curves import Picture
from kvbench.tools.bench.build import Built, build
from kvbench.tools.bench.journal import Cell, Record
from kvbench.tools.bench.machine import bandwidth
from kvbench.tools.bench.settings import Settings


@dataclass(frozen=True)
class Bench:
    """One call of the command line. usual_model: what the protocol runs on where `model=` says nothing."""

    settings: Settings
    device: torch.device
    usual_model: str  # "" where no model is run

    @cached_property
    def built(self) -> Built:
        s = self.settings
        return build(s.model or self.usual_model, s.weights, s.layers, s.dtype, self.device)

    @property
    def model_name(self) -> str:
        return self.built.name if self.usual_model else ""

    @property
    def judged(self) -> bool:
        """Whether bounds mean anything: they are for a GPU and sizes as they are written."""
        return self.device.type == "cuda" and self.scale == 1

    @property
    def scale(self) -> int:
        return self.settings.scale

    @cached_property
    def bandwidth(self) -> float:
        """Bytes per second of a copy on this device."""
        return bandwidth(self.device)

    def share_of_limit(self, ms: float, cache_bytes: float, record: Record | None = None) -> float:
        """How near a decoding step of `ms` comes to the time in which its bytes could be read at a copy's bandwidth.

        record: the cell it is of, if another process may have measured that, on a busier machine.
        """
        copied = self.bandwidth if record is None else record["copy_bytes_per_s"]
        return (self.built.bytes_read + cache_bytes) / copied / (1e-3 * ms)


@dataclass(frozen=True)
class Row:
    """One figure, in the columns of the papers' tables, and what it hangs on."""

    paper: str
    table: str
    model: str
    method: str
    budget: int | None
    budget_kind: str
    task: str
    metric: str
    value: float | None
    note: str = ""
    p20: float | None = None
    p50: float | None = None
    p80: float | None = None
    runs: int | None = None
    prompt: int | None = None
    new_tokens: int | None = None
    batch: int | None = None
    share_of_limit: float | None = None
    bound: str = ""
    met: bool | None = None


@dataclass(frozen=True)
class BenchProtocol(ABC):
    """What the command line runs: which cells to measure, and what they say together. model: "" where none is run."""

    name: str
    model: str

    @property
    def series(self) -> str:
        """The name of its journal; protocols that measure the same cells share one."""
        return self.name

    def identity(self, bench: Bench) -> dict[str, Any]:
        """What all its cells share beside the settings."""
        return {}

    @abstractmethod
    def remarks(self, bench: Bench) -> list[str]:
        """Lines of the header: sizes, and what is left out."""

    @abstractmethod
    def cells(self, bench: Bench) -> list[Cell]: ...

    @abstractmethod
    def rows(self, bench: Bench, found: Mapping[str, Record]) -> list[Row]:
        """The table of what was measured so far."""

    @abstractmethod
    def picture(self, bench: Bench, rows: list[Row]) -> Picture:
        """What is drawn of these rows."""
