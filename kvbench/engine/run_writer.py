"""One run while it is computed: who asked for it, its files, samples that wait to be written, and how it ends."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from kvbench.engine.callbacks import RunCallback
from kvbench.engine.prompts import blank, check_policy
from kvbench.engine.provenance import record_environment, write_config
from kvbench.errors import UsageError, refusing
from kvbench.models.prompts import Prompt
from kvbench.results.files import remove_torn
from kvbench.results.locks import RunBusyError, held
from kvbench.results.metrics_file import write_metrics
from kvbench.results.sample import Sample
from kvbench.results.samples import FILE_NAME, SampleFile, open_samples, read_samples
from kvbench.run.run import Run

_ASKED = {
    "prompt_hash": "answers to other prompts",
    "context_tokens": "answers to other questions",
    "max_new_tokens": "answers of another max_new_tokens",
    "references": "answers scored by other references",
    "metadata": "answers scored by other metadata",
}
"""What a sample says of its example's data, and what it is where that has changed."""

log = logging.getLogger(__name__)


class RunWriter:
    """A run, from its first check to its metrics: nothing that happens to it happens to another.

    cells: all that ask for it. Where one policy stands for several (`full` at two budgets), or limits differ, they are
    one run, computed once, up to the largest limit.
    """

    def __init__(self, run_id: str, cells: Sequence[Run], watch: RunCallback) -> None:
        unlimited = [cell for cell in cells if cell.limit is None]
        self.cells = list(cells)
        self.cell = unlimited[0] if unlimited else max(cells, key=lambda cell: cell.limit or 0)
        self.run_id = run_id
        self.folder = self.cell.out / run_id
        self.prompts: Sequence[Prompt] = ()
        self.error: Exception | None = None
        self.ended = False
        self.apart = False  # it is not worked with the others any more, but after them
        self._watch = watch
        self._done: list[Sample] = []
        self._left: dict[int, None] = {}  # examples that are to be written, in order
        self._ready: dict[int, Sample] = {}  # samples that wait for those before them
        self._file: SampleFile | None = None
        self._open = ExitStack()

    @contextmanager
    def own(self) -> Iterator[None]:
        """What goes wrong inside ends this run; the others go on."""
        try:
            yield
        except Exception as error:
            if self.ended:  # it was a watch, called at the end, and those have to catch their own
                raise
            self.end(error)

    def end(self, error: Exception | None = None) -> None:
        """Nothing more is computed: it is complete, or `error` is why it is not."""
        if self.ended:
            return
        self.ended, self.error = True, error
        self._ready.clear()
        self._open.close()
        for cell in self.cells:
            self._watch.ended(cell, error)

    @property
    def missing(self) -> list[int]:
        """The examples that are still to be computed."""
        return [i for i in self._left if i not in self._ready]

    def has(self, index: int) -> bool:
        """Whether one of its examples is on disk, or waits to be written."""
        return index not in self._left or index in self._ready

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Take these prompts as the run's. Raises UsageError where its policy, or what lies on disk, does not fit."""
        check_policy(self.cell, prompts)
        with refusing():
            self._done = read_samples(self.folder / FILE_NAME)
        check_same_data(self._done, prompts, self.folder)
        self.prompts = prompts
        self._left = self._lacking()

    def _lacking(self) -> dict[int, None]:
        """The examples that are to be written: failed ones again, then those that are not on disk."""
        failed = [sample.index for sample in self._done if sample.error is not None]
        wanted = [*failed, *range(len(self._done), len(self.prompts))]
        return dict.fromkeys(index for index in wanted if index < len(self.prompts))

    def begin(self, here: dict[str, Any]) -> None:
        """Open the files. Raises RunBusyError if another process computes this run. here: `environment` of this one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = self._open.enter_context(open_samples(self.folder / FILE_NAME))
        remove_torn(self.folder)
        self._done = self._file.samples
        self._left = self._lacking()
        write_config(self.cell, self.run_id, self.folder, self.prompts[0])
        record_environment(self.cell, self.folder, here)
        self._watch.started(self.cell, tuple(self._done), len(self.prompts))
        if self._done:
            log.info("%s: continues with example %d", self.run_id, next(iter(self._left), len(self._done)))

    def deliver(self, sample: Sample) -> None:
        """A sample is there, to be written when its turn comes; those of a run that ended are of no use."""
        if not self.ended:
            self._ready[sample.index] = sample

    def write(self, before: int | None = None) -> None:
        """Write the samples that wait: those below index `before`, and none whose predecessor is missing."""
        while not self.ended and self._left and (first := next(iter(self._left))) in self._ready:
            if before is not None and first >= before:
                return
            with self.own():
                assert self._file is not None
                sample = self._ready.pop(first)
                (self._file.replace if first < len(self._done) else self._file.append)(sample)
                del self._left[first]
                self._watch.finished(self.cell, sample)

    def finish(self) -> None:
        """Summarize the run: all its examples are on disk."""
        self.write()
        if self.ended:
            return
        assert not self._left, f"{self.run_id} is finished without its examples {list(self._left)}"
        if self._file is None:
            tidy(self.folder)
        else:
            self._file.check()
        numbers = write_metrics(self.folder, self._done)
        if self.cell.policy.evicts and numbers["evicted_share"] == 0:
            log.warning("%s: nothing was evicted from any cache, the budget is above every prompt", self.run_id)
        self.end()

    def close(self) -> None:
        """Write what is there, and close the files, whatever happened."""
        self.write()
        self._open.close()


def tidy(folder: Path) -> None:
    """Remove what a killed process left beside a complete run, which nobody opens any more: a lock, half a file."""
    if any(folder.glob(".*")):
        with suppress(RunBusyError), held(folder):
            remove_torn(folder)


def check_same_data(done: Sequence[Sample], prompts: Sequence[Prompt], folder: Path) -> None:
    """Results on disk must be of these very examples: a file of data may have changed behind their back."""
    for sample in done:
        if sample.index >= len(prompts):
            continue
        now = blank(prompts[sample.index])
        for name, what in _ASKED.items():
            written = json.loads(json.dumps(getattr(now, name), default=vars))  # as a line has it: tuples are lists
            if getattr(sample, name) != written:
                raise UsageError(
                    f"{folder} holds {what} (example {sample.index} differs): the task's data changed since; delete "
                    f"that folder or choose another out"
                )
