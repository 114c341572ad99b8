"""What the task function and the launchers do with composed configurations: compute one run, or the runs of a sweep."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbench.engine.prompts import make_prompts
from kvbench.errors import UsageError
from kvbench.report.trackers.watching import make_watch
from kvbench.results.definition import Definition, Entry, sweep_name, write_definition
from kvbench.results.environment import versions
from kvbench.results.run_state import is_complete, read_state
from kvbench.run.run import out_folder
from kvbench.sweeps.compute import close_tracker, compute
from kvbench.sweeps.jobs import Launcher, is_active, submit, submitted
from kvbench.sweeps.outcome import Outcome, is_expected, message_of, print_results
from kvbench.sweeps.plan import Asked, Planned, plan
from kvbench.terminal.command import write_message

POLL_SECONDS = 1.0


def run_one(asked: Asked) -> float | None:
    """Compute one run, print its table and return its score. Raises what keeps it from being complete."""
    runs, (key,) = plan([asked])
    if asked.config["dry_run"] is True:
        print_plan(runs)
        return None
    tracker = make_watch(asked.config["logger"], None)
    try:
        recorder = compute(runs, None, tracker)
    finally:
        tracker.close()
    if key in recorder.errors:
        error = recorder.errors[key]
        raise UsageError(message_of(error)) if is_expected(error) else error
    outcome = recorder.outcomes[key]
    scores = print_results([outcome])
    if outcome.error is not None:
        raise UsageError(outcome.error)
    return scores[key]


def run_sweep(asked: Sequence[Asked], command: str, launcher: Launcher) -> list[Outcome]:
    """Compute or submit the runs of a sweep and print their table; the outcome of each job, in order.

    A run that fails does not stop the others. A job that was only submitted has neither folder nor error.
    """
    out = out_folder(_same("out", asked))
    _same("logger", asked)
    runs, keys = plan(asked, elsewhere=launcher.cluster == "slurm")
    if any(one.config["dry_run"] is True for one in asked):
        print_plan(runs)
        return [Outcome(key, "") for key in keys]
    name = sweep_name(out, asked[0].choices.get("experiment"))
    entries = tuple(run.entry for run in runs)
    whole = write_definition(out, Definition(name, (command,), str(Path.cwd()), vars(launcher), versions(), entries))
    outcomes = {outcome.key: outcome for outcome in launch(out, runs, whole, launcher)}
    return [outcomes[key] for key in keys]


def launch(out: Path, runs: Sequence[Planned], whole: Definition, launcher: Launcher) -> list[Outcome]:
    """Compute or submit planned runs; their outcomes, in order, with their scores."""
    entries = [run.entry for run in runs]
    if launcher.in_process:
        tracker = make_watch(entries[0].config["logger"], whole.name)
        try:
            found = compute(runs, out, tracker).outcomes
        except KeyboardInterrupt:
            print_results([outcome for outcome in outcomes_on_disk(out, entries) if outcome.folder])
            raise
        finally:
            close_tracker(tracker, out, whole.cells)
        outcomes = [found.get(entry.key) or Outcome(entry.key, entry.title, error=entry.error) for entry in entries]
    else:
        _submit(out, entries, whole.name, launcher)
        if not launcher.wait:
            return [Outcome(entry.key, entry.title, error=entry.error) for entry in entries]
        wait(out, entries)
        outcomes = outcomes_on_disk(out, entries)
        for outcome in outcomes:
            if outcome.error is not None:
                write_message(f"{outcome.title}: {outcome.error}")
    scores = print_results(outcomes)
    return [Outcome(**{**vars(outcome), "score": scores.get(outcome.key)}) for outcome in outcomes]


def _submit(out: Path, entries: Sequence[Entry], name: str, launcher: Launcher) -> None:
    """Submit what is neither complete nor queued nor running."""
    before = submitted(out)
    left = [entry for entry in entries if entry.run_id is not None and not is_complete(out, entry)]
    left = [e for e in left if e.key not in before or not is_active(before[e.key])]
    if not left:
        write_message("nothing to submit: all runs are complete, queued or running")
        return
    jobs = submit(out, name, left, launcher)
    ids = ", ".join(job.job_id for job in jobs)
    sys.stdout.write(f"submitted {len(left)} runs in {len(jobs)} jobs: {ids}\n")
    if not launcher.wait:
        sys.stdout.write(f"python -m kvbench.sweep status {out}\npython -m kvbench.sweep wait {out}\n")


def wait(out: Path, entries: Sequence[Entry]) -> None:
    """Wait until no job of these runs is queued or running."""
    keys = {entry.key for entry in entries}
    jobs = {job.job_id: job for key, job in submitted(out).items() if key in keys}
    while any(is_active(job) for job in jobs.values()):
        time.sleep(POLL_SECONDS)


def outcomes_on_disk(out: Path, entries: Sequence[Entry]) -> list[Outcome]:
    """The outcome of every run as far as the sweep's folder shows it."""
    found = []
    for entry in entries:
        state = None if entry.run_id is None else read_state(out, entry.run_id)
        if is_complete(out, entry):
            found.append(Outcome(entry.key, entry.title, entry.limit, out / entry.key))
        else:
            error = entry.error or (state and state.error) or "not finished, the same command continues"
            found.append(Outcome(entry.key, entry.title, entry.limit, None, error))
    return found


def print_plan(runs: Sequence[Planned]) -> None:
    """Print how many prompts and tokens each run has, and the first prompt; nothing is computed."""
    tokens, shown = 0, ""
    cells = [(run.entry, run.cell) for run in runs if run.cell is not None]
    made: dict[tuple[str, int | None], Any] = {}
    for entry, cell in cells:
        if (entry.group, cell.limit) not in made:
            made[entry.group, cell.limit] = make_prompts(cell)
        prompts = made[entry.group, cell.limit]
        total = sum(len(prompt.ids) for prompt in prompts)
        tokens += total
        shown = shown or str(cell.checkpoint.tokenizer().decode(prompts[0].ids))
        sys.stdout.write(f"{entry.run_id}: {len(prompts)} prompts, {total} tokens\n")
    prefilled = sum(len(prompt.ids) for prompts in made.values() for prompt in prompts)
    sys.stdout.write(f"{len(cells)} runs: {tokens} prompt tokens, {prefilled} with shared prefills\n")
    sys.stdout.write(f"the first prompt:\n{shown}\n")


def _same(name: str, asked: Sequence[Asked]) -> Any:  # noqa: ANN401 - a value of the configuration
    """The value that all jobs of a sweep must share. Raises UsageError."""
    values = [one.config[name] for one in asked]
    if any(value != values[0] for value in values):
        raise UsageError(f"{name} must be the same for all runs of a sweep")
    return values[0]
