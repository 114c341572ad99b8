"""One run while it is computed: who asked for it, its files, samples that wait to be written, and how it ends."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kvbench.models.prompts import Prompt
from kvbench.runs.cell import Cell
from kvbench.runs.environment import other_versions
from kvbench.runs.files import write_json, write_yaml
from kvbench.runs.labels import names
from kvbench.runs.likelihood import label, policy_for, reads_whole
from kvbench.runs.metrics import metrics
from kvbench.runs.prompts import check_policy
from kvbench.runs.sample import Sample
from kvbench.runs.samples import FILE_NAME, SampleFile, open_samples, read_samples
from kvbench.runs.watch import Watch
from kvbench.terminal.errors import UsageError, refusing

log = logging.getLogger(__name__)


class Running:
    """A run, from its first check to its metrics: nothing that happens to it happens to another.

    cells: all that ask for it. Where one policy stands for several (`full` at two budgets), or limits differ, they are
    one run, computed once, up to the largest limit.
    """

    def __init__(self, run_id: str, cells: Sequence[Cell], watch: Watch) -> None:
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
        self._ready: dict[int, Sample] = {}  # samples that wait for those before them
        self._file: SampleFile | None = None
        self._open = ExitStack()

    @contextmanager
    def own(self) -> Iterator[None]:
        """What goes wrong inside ends this run; the others go on."""
        try:
            yield
        except Exception as error:
            if self.ended:  # it was a watch, told of the end, and those have to catch their own
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
    def missing(self) -> range:
        """The examples that are not on disk."""
        return range(len(self._done), len(self.prompts))

    def has(self, index: int) -> bool:
        """Whether an example is on disk, or waits to be written."""
        return index < len(self._done) or index in self._ready

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Take these prompts as the run's. Raises UsageError where its policy, or what lies on disk, does not fit."""
        check_policy(self.cell, prompts)
        with refusing():
            self._done = read_samples(self.folder / FILE_NAME)
        _check_same_prompts(self._done, prompts, self.folder)
        self.prompts = prompts

    def begin(self, here: dict[str, Any]) -> None:
        """Open the files; here: `environment` of this process. Raises RunBusyError where another computes this run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = self._open.enter_context(open_samples(self.folder / FILE_NAME))
        self._done = self._file.samples
        _record_start(self.cell, self.run_id, self.folder, here, self.prompts[0])
        self._watch.started(self.cell, tuple(self._done))
        if self._done:
            log.info("%s: continues with example %d", self.run_id, len(self._done))

    def deliver(self, sample: Sample) -> None:
        """A sample is there, to be written when its turn comes; those of a run that ended are of no use."""
        if not self.ended:
            self._ready[sample.index] = sample

    def write(self, before: int | None = None) -> None:
        """Write the samples that wait: those below index `before`, and none whose predecessor is missing."""
        while not self.ended and len(self._done) in self._ready and (before is None or len(self._done) < before):
            with self.own():
                assert self._file is not None
                sample = self._ready.pop(len(self._done))
                self._file.append(sample)
                self._watch.finished(self.cell, sample)

    def finish(self) -> None:
        """All examples are on disk: sum them up."""
        assert not self.missing, f"{self.run_id} is finished without its examples {self.missing}"
        if self._file is not None:
            self._file.check()
        numbers = metrics(self._done)
        write_json(self.folder / "metrics.json", numbers)
        if self.cell.policy.evicts and numbers["evicted_share"] == 0:
            log.warning("%s: nothing was evicted from any cache, the budget is above every prompt", self.run_id)
        self.end()

    def close(self) -> None:
        """Write what is there, and let go of the files, whatever happened."""
        self.write()
        self._open.close()


def _check_same_prompts(done: Sequence[Sample], prompts: Sequence[Prompt], folder: Path) -> None:
    """Results on disk must be answers to these very prompts (a text folder may have changed behind their back)."""
    for sample, prompt in zip(done, prompts, strict=False):
        if sample.prompt_hash != prompt.hash:
            raise UsageError(
                f"{folder} holds answers to other prompts (example {sample.index} differs): the task's data changed "
                f"since; delete that folder or choose another out"
            )


def _record_start(cell: Cell, run_id: str, folder: Path, here: dict[str, Any], first: Prompt) -> None:
    """Write config.yaml and environment.json before the first example."""
    naming = replace(cell.naming, reads=label(policy_for(cell.policy, first)) if reads_whole(first) else None)
    identity = cell.identity
    content = {
        "run_id": run_id,
        "names": names(naming, identity),
        "naming": {**asdict(naming), "changed": list(naming.changed)},
        "identity": identity,
        "config": dict(cell.config),
    }
    write_yaml(folder / "config.yaml", content)
    path = folder / "environment.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else dict(here)
    resumed = before.pop("resumed", [])
    if here not in (before, *resumed):
        changed = other_versions([before, *resumed], here)
        if changed and not cell.allow_mixed:
            raise UsageError(
                f"{folder} was begun with other versions ({changed}), and a run that mixes them measures neither: "
                "go back to those, choose another out, or set allow_mixed=true, which tables will show"
            )
        log.warning("%s: continued with other versions or hardware, see environment.json", run_id)
        resumed.append(here)
    write_json(path, {**before, **({"resumed": resumed} if resumed else {})})
