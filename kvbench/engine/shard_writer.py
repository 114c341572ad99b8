"""A shard of a run while it is computed, and how the last one of them makes the run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from kvbench.engine.run_writer import RunWriter, check_same_data
from kvbench.identity.provenance import environments, record_environments
from kvbench.records.locks import RunBusyError
from kvbench.records.samples import open_samples
from kvbench.records.shards import SHARD_FILE, on_disk, shard_folders, step_back

_POLL_SECONDS = 1.0


class ShardWriter(RunWriter):
    """Some of a run's examples, from the first check until they are on disk: its watch hears of the whole run last."""

    @property
    def members(self) -> Sequence[int]:
        """The examples that it is made of."""
        assert self.cell.shard is not None
        return self.cell.shard.members(self.prompts)

    def _lacking(self) -> deque[int]:
        """Its examples that are not on disk, wherever."""
        there = on_disk(self.folder)
        return deque(index for index in self.members if index not in there)

    def begin(self, here: dict[str, Any] | None) -> None:
        """Open the shard's file. Raises RunBusyError where another process computes it, or the run otherwise."""
        shard, place = self.cell.shard, self.cell.place
        assert shard is not None
        assert here is not None
        step_back(self.folder, shard)
        place.mkdir(parents=True, exist_ok=True)
        self._file = self._open.enter_context(open_samples(place / SHARD_FILE, whole=False))
        check_same_data(self._file.samples, self.prompts, place)
        step_back(self.folder, shard)  # again: who came between did not see this lock, who comes now does
        self._left, self._in_shards = self._lacking(), set()
        others = chain(*map(environments, [self.folder, *shard_folders(self.folder)]))
        record_environments(self.cell, place, [here], beside=list(others))
        self._watch.started(self.cell, tuple(self._file.samples), len(self.prompts))

    def finish(self) -> None:
        """Its examples are on disk: give it free, and make the run if nothing else is missing."""
        assert not self._left, f"{self.cell.place} is finished without its examples {list(self._left)}"
        if self._file is not None:
            self._file.check()
        self._open.close()
        self._put_together()
        self.end()

    def _put_together(self) -> None:
        """Make the run of its shards: all look for them once their own lock is free, so that the last one sees all.

        Where a shard has an owner still, that one comes later; where the run has, it may have looked too early.
        """
        cells = [replace(cell, shard=None) for cell in self.cells]
        while on_disk(self.folder).issuperset(range(len(self.prompts))):
            whole = RunWriter(self.run_id, cells, self._watch)
            try:
                whole.check(self.prompts)
                whole.finish()
                return
            except RunBusyError as busy:
                if busy.folder != self.folder:
                    return
                time.sleep(_POLL_SECONDS)
            except Exception as error:
                if whole.ended:
                    raise
                whole.end(error)
                return
            finally:
                whole.close()
