"""The runs of a sweep: each is built and checked before anything is computed, and equal ones are computed once."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvbench.errors import UsageError
from kvbench.results.definition import Entry
from kvbench.results.locks import RunBusyError, RunLostError
from kvbench.run.run import Run, build_run
from kvbench.run.run_config import typed
from kvbench.terminal.command import write_message


@dataclass(frozen=True)
class Composed:
    """A composed configuration. title: its overrides that other jobs do not have. choices: the name of each group."""

    title: str
    config: Mapping[str, Any]
    choices: Mapping[str, str]
    folders: Sequence[Path] = ()


@dataclass(frozen=True)
class Planned:
    """A run as sweep.yaml records it, and as it is computed. run: None if a value is wrong, see `entry.error`."""

    entry: Entry
    run: Run | None = None


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


def plan(composed: Sequence[Composed], elsewhere: bool = False) -> tuple[list[Planned], list[str]]:
    """All runs, each once, in order, and the key of the run of each configuration.

    elsewhere: other machines compute them, so this one does not need their devices. A wrong value is printed and kept
    as the error of its run; it raises UsageError if there is only one configuration.
    """
    found: dict[str, Planned] = {}
    keys, messages = [], Messages()
    for one in composed:
        try:
            planned = _planned(one, elsewhere)
        except UsageError as error:
            if len(composed) == 1:
                raise
            messages.print(one.title, str(error))
            planned = Planned(replace(_entry(one), error=str(error)))
        key = planned.entry.key
        keys.append(key)
        if key not in found or _limit(planned) > _limit(found[key]):  # of equal runs the one with more examples
            found[key] = planned
    messages.print_counts()
    return list(found.values()), keys


def _entry(one: Composed) -> Entry:
    choices = one.choices
    return Entry(one.title, choices["model"], choices["policy"], choices["task"], None, dict(one.config))


def _limit(planned: Planned) -> float:
    return float("inf") if planned.entry.limit is None else planned.entry.limit


def _planned(one: Composed, elsewhere: bool) -> Planned:
    config = typed(one.config, one.choices, one.folders)
    if elsewhere:
        config = replace(config, device="auto", engine=replace(config.engine, cuda_graph=False))
    run = build_run(config)
    entry = replace(_entry(one), limit=run.limit, run_id=run.run_id, changed=run.changed, identity=run.identity)
    return Planned(entry, run)


def rebuilt(entry: Entry, out: Path) -> Planned:
    """The run of an entry read from `out`. Raises UsageError if it is no longer the same run."""
    choices = {"model": entry.model, "policy": entry.policy, "task": entry.task}
    run = build_run(typed({**entry.config, "out": str(out)}, choices))
    if run.run_id != entry.run_id:
        raise UsageError(
            f"{entry.run_id} is now {run.run_id}: its code, its model or a file that it reads has changed since the "
            "sweep started; run its command again"
        )
    return Planned(entry, replace(run, changed=entry.changed, config=entry.config))


def message_of(error: BaseException) -> str:
    """The error message for a run that failed."""
    if isinstance(error, UsageError | RunBusyError | RunLostError):
        return str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"no space left to write results ({error.strerror}); finished examples are kept, free some space"
    first = (str(error).strip().splitlines() or ["no message"])[0]
    return f"{type(error).__name__}: {first}"


def is_expected(error: BaseException) -> bool:
    """Whether an error concerns the user or the machine, so that a traceback would not help."""
    return isinstance(error, UsageError | RunBusyError | RunLostError | OSError)
