"""What a launcher is asked to do, whoever does it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from kvbench.config.naming import refusing_in
from kvbench.config.tree import build
from kvbench.identity.environment import versions
from kvbench.records.definition import Definition, write_definition
from kvbench.report.trackers.watching import SweepWatch, make_watch
from kvbench.sweeps.plan import Planned
from kvbench.sweeps.states import tell_whole


@dataclass(frozen=True)
class Sweep:
    """Cells to compute, and the folder that keeps them.

    definition: all that its folder keeps, cells of earlier commands too; None for a lone cell in this process.
    shows: whether the launcher ends by printing the table of its cells.
    """

    out: Path
    planned: Sequence[Planned]
    definition: Definition | None = None
    shows: bool = True

    @contextmanager
    def tracked(self) -> Iterator[SweepWatch]:
        """What its cells are told to here: at the end of all results of the sweep. Raises UsageError."""
        whole = self.definition
        tracker = make_watch(self.planned[0].entry.config["logger"], None if whole is None else whole.name)
        try:
            yield tracker
        finally:
            tell_whole(tracker, self.out, [p.entry for p in self.planned] if whole is None else whole.cells)


def defined(
    out: Path, planned: Sequence[Planned], name: str, command: str, launcher: dict[str, Any], *, shows: bool = True
) -> Sweep:
    """A sweep that `command` asks for, written into the folder that keeps it. Raises OSError."""
    entries = tuple(p.entry for p in planned)
    definition = Definition(name, (command,), str(Path.cwd()), launcher, versions(), entries)
    return Sweep(out, planned, write_definition(out, definition), shows)


def make_launcher(config: Mapping[str, Any]) -> Launcher:
    """The launcher that the resolved node `launcher` of a configuration describes. Raises UsageError."""
    with refusing_in("launcher", config, "launcher: "):
        made = build(config)
        if not isinstance(made, Launcher):
            raise ValueError(f"launcher._target_={config.get('_target_')} is not a launcher")
        return made


class Launcher(ABC):
    """Where the cells of a sweep are computed: what `launcher=` names. Its fields are those of `launcher.`."""

    elsewhere: ClassVar[bool] = False
    """Whether cells run on other machines than the one that plans them."""

    @property
    def hands_on(self) -> bool:
        """Whether even a lone cell is computed by other processes, which read it from its folder."""
        return self.elsewhere

    @abstractmethod
    def launch(self, sweep: Sweep) -> int:
        """Compute what is missing of a sweep, or see to it that it is computed; returns the exit code."""
