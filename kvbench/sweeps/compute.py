"""The runs of a sweep: each is built and checked before anything is computed; equal ones are computed once."""

from __future__ import annotations

import errno
import logging
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvbench.config.parts import build, converted, refusing_in
from kvbench.engine.compute import compute_runs
from kvbench.engine.prompts import make_prompts
from kvbench.engine.run_writer import RunCallback
from kvbench.errors import CHANGED, UsageError, counted, one_line
from kvbench.results.definition import Entry, RunState, examples, failed_examples, write_state
from kvbench.results.files import RunBusyError, RunLostError
from kvbench.results.loading import read_result
from kvbench.results.result import Result
from kvbench.results.samples import Sample
from kvbench.run.run import Run, build_run
from kvbench.run.run_config import RunConfig, typed
from kvbench.terminal.command import write_message
from kvbench.terminal.escapes import visible

log = logging.getLogger(__name__)


class Messages:
    """Prints the error messages of runs, each once, with the first run that it concerns."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def print(self, title: str, message: str, error: BaseException | None = None) -> None:
        """Print the message of one run. error: its traceback is printed as well."""
        self._counts[message] += 1
        if self._counts[message] == 1:
            write_message(f"{title}: {message}", error)

    def print_counts(self) -> None:
        """Print how many more runs each message concerns."""
        for message, count in self._counts.items():
            if count > 1:
                write_message(
                    f"{count - 1} more {'run has' if count == 2 else 'runs have'} the same problem: {message}"
                )


def plan(
    entries: Sequence[Entry], folders: Sequence[Path] = (), elsewhere: bool = False
) -> tuple[list[Entry], dict[str, Run]]:
    """The checked entries of configurations, in order, and the runs by key. Equal runs are one entry.

    folders: of the user's configurations. elsewhere: other machines compute the runs, so this one does not need their
    devices. A wrong value is printed and kept as the error of its entry, which has no run; it raises UsageError if
    there is only one configuration.
    """
    found: dict[str, Entry] = {}
    runs: dict[str, Run] = {}
    keys, messages = [], Messages()
    for entry in entries:
        try:
            config = typed(entry.config, entry.names, folders)
            if elsewhere:
                config = replace(config, device="auto", engine=replace(config.engine, cuda_graph=False))
            run = build_run(config)
        except UsageError as error:
            if len(entries) == 1:
                raise
            messages.print(entry.title, str(error))
            found[entry.key] = replace(entry, error=str(error))
            keys.append(entry.key)
            continue
        keys.append(run.run_id)
        if run.run_id not in runs or _limit(run) > _limit(runs[run.run_id]):  # of equal runs that with most examples
            runs[run.run_id] = run
            found[run.run_id] = replace(
                entry, limit=run.limit, run_id=run.run_id, changed=run.changed, identity=run.identity
            )
    messages.print_counts()
    return [found[key] for key in keys], runs


def _limit(run: Run) -> float:
    return float("inf") if run.limit is None else run.limit


def rebuilt(entry: Entry, out: Path) -> Run:
    """The run of an entry read from `out`. Raises UsageError if it is no longer the same run."""
    with entry.working_folder():
        run = build_run(typed({**entry.config, "out": str(out)}, entry.names))
        run_id = run.run_id  # it contains digests of files below this folder
    if run_id != entry.run_id:
        raise UsageError(f"{entry.run_id} is now {run_id}: its code, {CHANGED}")
    return replace(run, changed=entry.changed, config=entry.config)


def message_of(error: BaseException) -> str:
    """The error message for a run that failed."""
    if isinstance(error, UsageError | RunBusyError | RunLostError):
        return str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"no space left to write results ({error.strerror}); finished examples are kept, free some space"
    return one_line(error)


def is_expected(error: BaseException) -> bool:
    """Whether an error concerns the user or the machine, so that a traceback would not help."""
    return isinstance(error, UsageError | RunBusyError | RunLostError | OSError)


# --- trackers (`logger=`) --------------------------------------------------------------------------------------------
class SweepCallback(RunCallback):
    """A run callback with a method for the end of a sweep. This one does nothing: `logger=none`."""

    def close(self, records: Sequence[Result] = ()) -> None:
        """Called at the end. records: all finished runs of the sweep; empty if this process computed only some."""


def make_watch(logger: Mapping[str, Any], sweep: str | None) -> SweepCallback:
    """Build the callback from the resolved `logger` configuration: a class with a method `watch(sweep)`.

    sweep: the name of the sweep, None for a single run. Raises UsageError for wrong settings. The first later error of
    the tracker is logged as a warning.
    """
    if not logger:
        return SweepCallback()
    with refusing_in("logger", logger, "logger: "):
        tracker = build(logger)
        if not hasattr(tracker, "watch"):
            raise ValueError(f"logger._target_={logger.get('_target_')} is not a logger")
        callback: SweepCallback | None = tracker.watch(sweep)
    return SweepCallback() if callback is None else Guarded(callback, getattr(tracker, "label", type(tracker).__name__))


class Guarded(SweepCallback):
    """Calls another callback until its first error, which is logged as a warning, so that a tracker never fails a run.

    name: of the tracker, for the warning.
    """

    def __init__(self, watch: SweepCallback, name: str) -> None:
        self._watch: SweepCallback = watch
        self._name = name

    def started(self, run: Run, done: Sequence[Sample], total: int) -> None:
        """Pass on the start of a run."""
        self._pass("started", run, done, total)

    def finished(self, run: Run, sample: Sample) -> None:
        """Pass on an example."""
        self._pass("finished", run, sample)

    def ended(self, run: Run, error: Exception | None) -> None:
        """Pass on the end of a run."""
        self._pass("ended", run, error)

    def close(self, records: Sequence[Result] = ()) -> None:
        """Pass on the end of the sweep. A second call does nothing."""
        self._pass("close", records)
        self._watch = SweepCallback()

    def _pass(self, event: str, *arguments: object) -> None:
        try:
            getattr(self._watch, event)(*arguments)
        except (Exception, SystemExit) as error:
            log.warning(
                "logger=%s failed (%s) and is disabled; results are complete in out", self._name, one_line(error)
            )
            self._watch = SweepCallback()


# --- computing -------------------------------------------------------------------------------------------------------
class SweepRecorder(RunCallback):
    """Writes the state of every run of the sweep in `out` and prints errors, then calls another.

    titles: of the runs, by run id.
    """

    def __init__(self, titles: dict[str, str], out: Path, tracker: SweepCallback) -> None:
        self._titles, self._out, self._tracker = titles, out, tracker
        self._totals: dict[str, int] = {}
        self.errors: list[str] = []
        self.messages = Messages()

    def started(self, run: Run, done: Sequence[Sample], total: int) -> None:
        """Examples of a run will be computed, `total` of them with those on disk, `done`."""
        self._tracker.started(run, done, total)
        self._totals[run.run_id] = total
        self._write(run)

    def finished(self, run: Run, sample: Sample) -> None:
        """One more example of a run is on disk."""
        self._tracker.finished(run, sample)

    def ended(self, run: Run, error: Exception | None) -> None:
        """A run is complete, or stopped because of `error`."""
        self._tracker.ended(run, error)
        message = None if error is None else message_of(error)
        if error is None:
            self._totals[run.run_id] = examples(run.folder)[0]
        if reported := message or failed_examples(run.folder):
            title = self._titles[run.run_id]
            self.messages.print(title, reported, None if error is None or is_expected(error) else error)
            self.errors.append(f"{title}: {reported}")
        self._write(run, message)

    def _write(self, run: Run, error: str | None = None) -> None:
        try:
            write_state(self._out, run.run_id, RunState(run.limit, self._totals.get(run.run_id), error))
        except OSError as reason:  # only `sweep status` reads it
            log.warning("the state of %s cannot be written (%s)", run.run_id, reason.strerror)


def compute(entries: Sequence[Entry], runs: Mapping[str, Run], out: Path, tracker: SweepCallback) -> list[str]:
    """Compute the missing examples of the runs of a sweep; returns the error messages of runs that failed.

    runs: by the keys of their entries. Messages are also printed, and written to the state of their run.
    """
    recorder = SweepRecorder({entry.key: entry.title for entry in entries}, out, tracker)
    try:
        places = [(entry.folder, entry.modules) for entry in entries]
        for place in dict.fromkeys(places):  # data is read while runs are computed
            some = [entry for entry, own in zip(entries, places, strict=True) if own == place]
            with some[0].working_folder():
                compute_runs([runs[entry.key] for entry in some if entry.key in runs], recorder)
    finally:
        recorder.messages.print_counts()
    return recorder.errors


def run_one(entry: Entry, folders: Sequence[Path]) -> float | None:
    """Compute one run, print its table and return its score. Raises the error that kept it from being complete."""
    (entry,), runs = plan([entry], folders)
    run = runs[entry.key]
    if is_dry(entry):
        print_plan([entry], runs)
        return None
    tracker = make_watch(entry.config["logger"], None)
    try:
        (error,) = compute_runs([run], tracker)
    finally:
        tracker.close()
    if error is not None:
        raise UsageError(message_of(error)) if is_expected(error) else error
    result = read_result(run.folder)
    from kvbench.report.table import print_table  # pandas

    print_table([result])
    if message := failed_examples(run.folder):
        raise UsageError(message)
    return result.value


def is_dry(entry: Entry) -> bool:
    """Whether only the plan is asked for: `dry_run=true`, and other words that OmegaConf reads so, such as `yes`."""
    return converted(RunConfig, {"dry_run": entry.config["dry_run"]})["dry_run"] is True


def print_plan(entries: Sequence[Entry], runs: Mapping[str, Run]) -> None:
    """Print how many prompts and tokens each run has, and the first prompt; nothing is computed."""
    shown, counts = "", []
    made: dict[tuple[str, int | None], Any] = {}
    for entry, run in ((entry, runs[entry.key]) for entry in entries if entry.key in runs):
        if (entry.group, run.limit) not in made:
            made[entry.group, run.limit] = make_prompts(run)
        prompts = made[entry.group, run.limit]
        counts.append(sum(len(prompt.ids) for prompt in prompts))
        shown = shown or str(run.checkpoint.tokenizer().decode(prompts[0].ids))
        sys.stdout.write(f"{entry.run_id}: {counted(len(prompts), 'prompt')}, {counted(counts[-1], 'token')}\n")
    shared = sum(len(prompt.ids) for prompts in made.values() for prompt in prompts)
    sys.stdout.write(
        f"{counted(len(counts), 'run')}: {counted(sum(counts), 'prompt token')}, {shared} with shared prefills\n"
    )
    sys.stdout.write("the first prompt:\n" + visible(_both_ends(shown), "\n\t") + "\n")


def _both_ends(text: str, most: int = 600) -> str:
    """A long text without its middle: a question is at its end."""
    left_out = len(text) - most
    return text if left_out <= 0 else f"{text[: most // 2]}\n[{left_out:,} characters]\n{text[-most // 2 :]}"
