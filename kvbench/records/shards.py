"""Shards: parts of a run's examples that several processes compute at once, each in a folder of its own.

A shard lies in the folder of its run (`shard-2of4`), with its samples, its lock and its environment. Whoever comes
last takes all of them into the run's own samples.jsonl, in order, and removes them. Two rules keep that safe:

- Who computes a shard holds its lock; who computes or puts together the run holds the run's lock and those of all its
  shards.
- Everybody takes the own lock first and looks at the others' then, so that of two who meet at least one steps back.

Shards of another number than those that are computed now were left by an earlier launch: their samples count.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.records.locks import RunBusyError, holder
from kvbench.records.samples import FILE_NAME

if TYPE_CHECKING:
    from kvbench.models.prompts import Prompt  # imports torch: not for a folder's status

SHARD_FILE = "shard.jsonl"
"""The samples of a shard: lines as in samples.jsonl, of its own examples."""
_PREFIX = "shard-"
_NAME = re.compile(rf"{_PREFIX}\d+of\d+")
_INDEX = re.compile(rb'^\{"index": (\d+),.*\n', re.MULTILINE)


@dataclass(frozen=True)
class Shard:
    """One of the parts of a run's examples. number: 1 to `of`."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}of{self.of}"

    @classmethod
    def named(cls, name: str) -> Shard:
        """The shard that is written as "2of4"."""
        number, of = name.split("of")
        return cls(int(number), int(of))

    def folder(self, run: Path) -> Path:
        """Where its files are, in the folder of its run."""
        return run / f"{_PREFIX}{self}"

    def members(self, prompts: Sequence[Prompt]) -> list[int]:
        """Its examples among the first ones of a task: the same under any limit.

        They are dealt to the shards in turn; what asks about the same context stays together and shares its prefill.
        """
        return [index for index, turn in enumerate(_turns(prompts)) if turn % self.of == self.number - 1]


def _turns(prompts: Sequence[Prompt]) -> Iterator[int]:
    turn, before = -1, None
    for prompt in prompts:
        context = prompt.context_hash
        turn += context is None or context != before
        before = context
        yield turn


def shard_folders(run: Path) -> list[Path]:
    """The folders of all shards of a run that lie there, of whatever number."""
    return sorted(path for path in run.glob(f"{_PREFIX}*") if _NAME.fullmatch(path.name))


def indices(path: Path) -> set[int]:
    """The examples whose lines are whole, as a file of samples names them; none where there is no such file."""
    try:
        return {int(index) for index in _INDEX.findall(path.read_bytes())}
    except FileNotFoundError:
        return set()


def in_shards(run: Path) -> set[int]:
    """The examples of a run that its shards hold."""
    return set[int]().union(*(indices(folder / SHARD_FILE) for folder in shard_folders(run)))


def on_disk(run: Path) -> set[int]:
    """The examples of a run that are computed, in shards or in its own file."""
    held = in_shards(run)  # first: what is taken in from a shard meanwhile must not be missed in both
    return held | indices(run / FILE_NAME)


def step_back(run: Path, shard: Shard) -> None:
    """Raise RunBusyError where a process computes this run as a whole, or in shards of another number."""
    others = [path for path in shard_folders(run) if Shard.named(path.name.removeprefix(_PREFIX)).of != shard.of]
    for folder in (run, *others):
        if holder(folder) is not None:
            raise RunBusyError(f"another process is computing this run: {folder} belongs to it", folder)


def remove(folder: Path) -> None:
    """Delete a shard whose samples its run has. The caller holds its lock."""
    shutil.rmtree(folder, ignore_errors=True)  # what is left of it goes with the next command
