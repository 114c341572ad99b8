"""Runs while they are computed: their files, and the order in which their examples are computed and written."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from kvbench.engine.prompts import blank, check_policy
from kvbench.engine.sequence import Request
from kvbench.engine.teacher_forcing import policy_for
from kvbench.errors import UsageError, refusing
from kvbench.models.prompt import Prompt
from kvbench.policies.schedule import Blocks
from kvbench.results.definition import environments
from kvbench.results.files import RunBusyError, held, remove_torn, write_json, write_yaml
from kvbench.results.labels import names
from kvbench.results.metrics import write_metrics
from kvbench.results.samples import FILE_NAME, Sample, SampleFile, open_samples, read_samples
from kvbench.results.session import machine, other_versions
from kvbench.results.summary import write_summary
from kvbench.run.run import Run

_ENVIRONMENT = "environment.json"
_DATA = {
    "prompt_hash": "answers to other prompts",
    "context_tokens": "answers to other questions",
    "max_new_tokens": "answers with another max_new_tokens",
    "references": "answers scored by other references",
    "metadata": "answers scored by other metadata",
}
"""Fields of a sample that depend on the task's data, and what the samples on disk are if one has changed."""

log = logging.getLogger(__name__)


class RunCallback:
    """Follows runs while they are computed, for example for a dashboard. An exception in a method ends the run."""

    def started(self, run: Run, done: Sequence[Sample], total: int) -> None:
        """A run starts; `total` of its examples include the samples `done` that are on disk."""

    def finished(self, run: Run, sample: Sample) -> None:
        """One more sample of a run is on disk."""

    def ended(self, run: Run, error: Exception | None) -> None:
        """A run is complete, or ended with an error."""


class RunWriter:
    """One run from its first check to its metrics. Errors inside `isolated` end this run and no other.

    runs: all runs with this id, which are computed once, up to the largest limit (limits differ, or `full` has several
    budgets). run: the one with the largest limit. run_alone: it is computed after the batch, by itself.
    """

    def __init__(self, run_id: str, runs: Sequence[Run], callback: RunCallback) -> None:
        unlimited = [run for run in runs if run.limit is None]
        self.runs = list(runs)
        self.run = unlimited[0] if unlimited else max(runs, key=lambda run: run.limit or 0)
        self.run_id = run_id
        self.folder = self.run.out / run_id
        self.prompts: Sequence[Prompt] = ()
        self.error: Exception | None = None
        self.ended = False
        self.run_alone = False
        self._callback = callback
        self._done: list[Sample] = []
        self._left: dict[int, None] = {}  # examples to be written, in order
        self._ready: dict[int, Sample] = {}  # samples that wait for the samples before them
        self._file: SampleFile | None = None
        self._open = ExitStack()

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """An exception inside ends this run; the others continue."""
        try:
            yield
        except Exception as error:
            if self.ended:  # it comes from a callback, called at the end of the run
                raise
            self.end(error)

    def end(self, error: Exception | None = None) -> None:
        """Stop the run: it is complete, or `error` ended it."""
        if self.ended:
            return
        self.ended, self.error = True, error
        self._ready.clear()
        self._open.close()
        for run in self.runs:
            self._callback.ended(run, error)

    @property
    def live(self) -> bool:
        """Whether the batch computes it."""
        return not (self.ended or self.run_alone)

    @property
    def missing(self) -> list[int]:
        """The examples that are not computed yet."""
        return [i for i in self._left if i not in self._ready]

    def has(self, index: int) -> bool:
        """Whether an example is on disk or waits to be written."""
        return index not in self._left or index in self._ready

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Set the run's prompts. Raises UsageError if its policy or its results on disk do not fit them."""
        check_policy(self.run, prompts)
        with refusing():
            self._done = read_samples(self.folder / FILE_NAME)
        _check_same_data(self._done, prompts, self.folder)
        self.prompts = prompts
        self._left = self._find_left()

    def _find_left(self) -> dict[int, None]:
        """The examples to be written: failed ones, then those that are not on disk."""
        failed = [sample.index for sample in self._done if sample.error is not None]
        wanted = [*failed, *range(len(self._done), len(self.prompts))]
        return dict.fromkeys(index for index in wanted if index < len(self.prompts))

    def begin(self, environment: dict[str, Any]) -> None:
        """Open the files. Raises RunBusyError if another process computes this run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = self._open.enter_context(open_samples(self.folder / FILE_NAME))
        remove_torn(self.folder)
        self._done = self._file.samples
        self._left = self._find_left()
        _write_config(self.run, self.run_id, self.folder, self.prompts[0])
        _record_environment(self.run, self.folder, environment)
        self._callback.started(self.run, tuple(self._done), len(self.prompts))
        if self._done:
            log.info("%s: continues with example %d", self.run_id, next(iter(self._left), len(self._done)))

    def deliver(self, sample: Sample) -> None:
        """Write the samples that are next in order, if it is one of them. One that is on disk changes nothing."""
        if not self.ended and sample.index in self._left:
            self._ready[sample.index] = sample
        while not self.ended and self._left and (first := next(iter(self._left))) in self._ready:
            with self.isolated():
                assert self._file is not None
                sample = self._ready.pop(first)
                (self._file.replace if first < len(self._done) else self._file.append)(sample)
                del self._left[first]
                self._callback.finished(self.run, sample)

    def finish(self) -> None:
        """Write the metrics of a run whose examples are all on disk."""
        assert not self._left, f"{self.run_id} is finished without its examples {list(self._left)}"
        if self._file is None:
            _tidy(self.folder)
        else:
            self._file.check()
        numbers = write_metrics(self.folder, self._done)
        write_summary(self.folder, self._done)
        if self.run.policy.evicts and numbers["evicted_share"] == 0:
            log.warning("%s: nothing was evicted from any cache, the budget is above every prompt", self.run_id)
        if numbers["clipped"]:
            log.warning(
                "%s: %d numbers of keys and values are beyond the store's fixed scales and were clipped, so that the "
                "answers are those of other numbers; set policy.store.key_scales and value_scales for this model",
                self.run_id,
                numbers["clipped"],
            )
        self.end()

    def close(self) -> None:
        """Close the files."""
        self._open.close()


def _tidy(folder: Path) -> None:
    """Remove the lock and partial files that a killed process left in the folder of a complete run."""
    if any(folder.glob(".*")):
        with suppress(RunBusyError), held(folder):
            remove_torn(folder)


def _check_same_data(done: Sequence[Sample], prompts: Sequence[Prompt], folder: Path) -> None:
    """Raise UsageError if samples on disk belong to other examples, because the task's data has changed."""
    for sample in done:
        if sample.index >= len(prompts):
            continue
        now = blank(prompts[sample.index])
        for name, found in _DATA.items():
            expected = json.loads(json.dumps(getattr(now, name), default=vars))  # as in the file: tuples are lists
            if getattr(sample, name) != expected:
                raise UsageError(
                    f"{folder} holds {found} (example {sample.index} differs): the task's data has changed since; "
                    "delete that folder or choose another out"
                )


# --- the order in which examples are computed and written ------------------------------------------------------------
@dataclass
class WorkItem:
    """One example and the runs that need it.

    request: made at its first admission. start: before the prefill for the first of its runs, in time.monotonic().
    """

    index: int
    prompt: Prompt
    runs: Sequence[RunWriter]
    request: Request | None = None
    start: float | None = None

    @property
    def conversation(self) -> int:
        """A number that all turns of a conversation share: the example of its first turn."""
        return self.index // self.runs[0].run.samples - max(0, len(self.prompt.turns) - 1)

    @property
    def live(self) -> list[RunWriter]:
        """The runs for which it is to be computed now."""
        return [run for run in self.runs if run.live]


def work_items(runs: Sequence[RunWriter]) -> list[WorkItem]:
    """Every example that one of the runs needs, in order. The runs have equal prompts, up to their limits."""
    longest = max((run.prompts for run in runs), key=len, default=())
    needed = [(run, set(_needed(run))) for run in runs if not run.ended]
    needing = (tuple(run for run, indices in needed if index in indices) for index in range(len(longest)))
    return [WorkItem(i, prompt, some) for i, (prompt, some) in enumerate(zip(longest, needing, strict=True)) if some]


def _needed(run: RunWriter) -> Iterator[int]:
    """The missing examples of a run, and the turns whose answers are in the history of a missing one."""
    for index in run.missing:
        earlier = len(run.prompts[index].turns) - 1 if run.prompts[index].own else 0
        yield from range(index - earlier, index + 1)


def one_by_one(items: Sequence[WorkItem]) -> Iterator[WorkItem]:
    """Every item for one run after the other; a run computes all turns of a conversation before the next run."""
    for _, group in groupby(items, key=lambda item: item.conversation):
        turns = list(group)
        for run in {run: None for turn in turns for run in turn.runs}:
            for turn in sorted(turns, key=lambda turn: turn.prompt.sample or 0):
                if run in turn.runs:
                    yield replace(turn, runs=[run])


# --- config.yaml and environment.json --------------------------------------------------------------------------------
def _write_config(run: Run, run_id: str, folder: Path, first: Prompt) -> None:
    """Write config.yaml. first: any prompt of the run."""
    naming = replace(run.naming, reads=_block_label(run, first) if first.is_whole_text else None)
    content = {
        "run_id": run_id,
        "names": names(naming, run.identity),
        "naming": {**asdict(naming), "changed": list(naming.changed)},
        "identity": run.identity,
        "checkpoint_dtype": str(run.checkpoint.stored_dtype).removeprefix("torch."),
        "config": dict(run.config),
    }
    write_yaml(folder / "config.yaml", content)


def _block_label(run: Run, prompt: Prompt) -> str:
    """The block size, which tables add to the name of a policy that scores whole texts."""
    policy = policy_for(run.policy, prompt)
    if not policy.evicts:
        return ""
    assert isinstance(policy.schedule, Blocks), "policy_for accepts no other schedule for a whole text"
    return f"m={policy.schedule.size:g}"


def _record_environment(run: Run, folder: Path, here: Mapping[str, Any]) -> None:
    """Add this process's environment to the file in `folder` if it is new.

    Raises UsageError if versions differ, unless `allow_version_mismatch` is set.
    """
    known = environments(folder / _ENVIRONMENT)
    if here in known:
        return
    if not known and (folder / FILE_NAME).stat().st_size:
        log.warning("%s: %s was missing or damaged, it now describes this process", run.run_id, _ENVIRONMENT)
    changed = other_versions(known, here)
    if changed and not run.allow_version_mismatch:
        raise UsageError(
            f"{folder} was begun with other versions ({changed}), and a run that mixes them measures neither: "
            "go back to those, choose another out, or set allow_version_mismatch=true, which tables will show"
        )
    # Threads matter only to a run that is timed.
    then, now = ([machine(one, threads=run.rows == 1) for one in some] for some in (known, [here]))
    if changed:
        log.warning("%s: continued with other versions (%s), see environment.json", run.run_id, changed)
    elif known and now[0] not in then:
        log.warning("%s: continued on %s, begun on %s, see environment.json", run.run_id, now[0], then[0])
    known.append(dict(here))
    write_json(folder / _ENVIRONMENT, {**known[0], **({"resumed": known[1:]} if known[1:] else {})})
