"""A submission held against what its leaderboard asks: everything that its samples say is computed again from them.

What cannot be seen from samples is whether a model really wrote these answers: `again` computes some of them anew.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

from kvbench.analysis.load import Results, read_result
from kvbench.analysis.metrics import metrics
from kvbench.analysis.metrics_file import summed_up
from kvbench.analysis.result import Result
from kvbench.config.choices import chosen
from kvbench.config.overrides import lay
from kvbench.config.presets import SCHEDULE
from kvbench.engine.prompts import blank, prompts_for
from kvbench.engine.run import run_cells
from kvbench.identity.cell import Cell, build_cell, changed_fields, digest_of
from kvbench.leaderboard.asked import FIXED, Asked, Submission, asked, placeless, task_of
from kvbench.leaderboard.held import bytes_refused, tokens_refused
from kvbench.models.prompts import Prompt
from kvbench.records.files import read_yaml
from kvbench.records.sample import Sample
from kvbench.records.samples import FILE_NAME, read_samples
from kvbench.terminal.errors import UsageError

_SET = {
    "sample": "it is another answer of its prompt than the set's",
    "prompt_hash": "its prompt is not the set's",
    "prompt_tokens": "its prompt is longer or shorter than the set's",
    "references": "its references are not the set's",
    "metadata": "its metadata are not the set's",
    "context_tokens": "its context is longer or shorter than the set's",
    "max_new_tokens": "its answer was given other max_new_tokens than the set's",
}
_ANSWER = ("output", "score", "kept_tokens", "cache_bytes", "generated_tokens")
"""What an example computed anew must repeat."""


class RefusedError(Exception):
    """One sentence: why a run has no place on a leaderboard."""


@dataclass
class Checker:
    """Checks the runs of a submission; given: fields of their configurations that are otherwise on this machine."""

    submission: Submission
    given: Mapping[str, Any] = field(default_factory=dict)
    again: int = 0
    runs: list[Result] = field(default_factory=list)  # those that hold
    _prompts: dict[str, Sequence[Prompt]] = field(default_factory=dict)

    @property
    def named(self) -> Results:
        """The runs that hold, named so that they can be told apart."""
        return Results(self.runs)

    def refusals(self) -> list[str]:
        """A sentence for each run that does not hold, and for each that is missing; none where all is well."""
        wanted, found, cells = asked(self.submission.experiment), [], []
        folders = sorted(path.parent for path in self.submission.folder.rglob(FILE_NAME))
        for folder in folders:
            try:
                cells.append(self._run(folder, wanted))
            except (RefusedError, UsageError) as error:
                found.append(f"{folder.name}: {error}")
        if not folders:
            found.append(f"{self.submission.folder} holds no run")
        return found or [*self._missing(cells, wanted), *(self._anew(cells) if self.again else ())]

    def _run(self, folder: Path, wanted: Asked) -> Cell:
        """The cell of a run that holds. Raises RefusedError and UsageError."""
        run = read_result(folder)
        told = read_yaml(folder / "config.yaml")
        cell = self._cell(run, told["config"], wanted)
        prompts = self._set(cell, wanted)
        if len(run.samples) != len(prompts):
            raise RefusedError(f"it has {len(run.samples)} of the set's {len(prompts)} examples")
        for sample, prompt in zip(run.samples, prompts, strict=True):
            if why := _example(cell, prompt, sample):
                raise RefusedError(f"example {sample.index}: {why}")
        if why := _unlike(run.samples):
            raise RefusedError(why)
        summed = summed_up(folder, run.samples)
        if summed is None:
            raise RefusedError(
                "metrics.json was not computed from these samples by this version: they were changed since"
            )
        if json.loads(json.dumps(metrics(run.samples))) != summed:
            raise RefusedError("metrics.json is not what its samples sum up to")
        self.runs.append(run)
        return cell

    def _cell(self, run: Result, config: dict[str, Any], wanted: Asked) -> Cell:
        """The cell that a run's configuration makes here. Raises RefusedError where the run is of another."""
        for name in FIXED:
            if config[name] != wanted.fixed[name]:
                raise RefusedError(f"{name}={config[name]} is not the leaderboard's ({wanted.fixed[name]})")
        if task_of(config) not in wanted.tasks:
            raise RefusedError(f"task {run.task} is none of the leaderboard's, in all its fields")
        if run.budget is not None and (task_of(config), run.budget) not in wanted.cells:
            raise RefusedError(f"budget={run.budget} is none of the leaderboard's")
        elsewhere = {"out": gettempdir(), "device": "auto", "engine": {"rows": None, "cuda_graph": False}}
        here = deepcopy({**config, **elsewhere})
        for key, value in self.given.items():
            lay(here, key, value)
        cell = build_cell(here, run.naming.policy, run.naming.model)
        theirs, ours = placeless(run.identity), json.loads(json.dumps(placeless(cell.identity)))
        unlike = [key for key in ours if theirs.get(key) != ours[key]]
        if unlike or theirs.keys() != ours.keys():
            raise RefusedError(f"its {unlike[0] if unlike else 'identity'} is not what its configuration makes here")
        if not run.run_id.endswith(f"-{digest_of(run.identity)}"):
            raise RefusedError("its run id is not the digest of its identity")
        named = chosen("model", run.naming.model) if config["model"]["path"] is None else {}
        sources = [(named.get(key), config["model"][key]) for key in ("hub_id", "bundled")]
        if run.naming.task != cell.task.name or any(told not in (None, own) for told, own in sources):
            raise RefusedError(f"it is called {run.naming.model} on {run.naming.task}, but it is another's run")
        plain = {**config, **dict.fromkeys(SCHEDULE), "policy": chosen("policy", run.naming.policy)}
        changed = {key for key in changed_fields(config, plain) if key.startswith("policy.")}
        if changed != {key for key in run.naming.changed if key.startswith("policy.")}:
            raise RefusedError(f"it is called {run.naming.policy}, but its fields are not those of that name")
        return cell

    def _set(self, cell: Cell, wanted: Asked) -> Sequence[Prompt]:
        """The prompts of the whole set, made once for all runs that read them."""
        key = json.dumps([cell.identity[name] for name in ("model", "dtype", "task", "seed", "compress", "generation")])
        if key not in self._prompts:
            cell = replace(cell, limit=None if wanted.limit is None else wanted.limit * cell.samples)
            self._prompts[key] = prompts_for([cell]).first(cell.limit)
        return self._prompts[key]

    def _missing(self, cells: Sequence[Cell], wanted: Asked) -> Iterator[str]:
        """Every policy has a run for each task and budget, once, and the full cache is among them."""
        runs: dict[str, Counter[tuple[str, int | float | None]]] = {}
        for cell in cells:
            who = json.dumps([cell.policy_name, cell.identity["model"], cell.identity["policy"]], default=str)
            runs.setdefault(who, Counter())[task_of(cell.config), cell.budget] += 1
        for who, own in runs.items():
            asks = wanted.cells if any(budget is not None for _, budget in own) else {(t, None) for t in wanted.tasks}
            name = json.loads(who)[0]
            if len(own) < len(asks):
                yield f"{name} has {len(own)} of the {len(asks)} runs that the leaderboard asks for"
            if max(own.values()) > 1:
                yield f"{name} has the same run twice"
        if not any(run.is_full for run in self.runs):
            yield "the full cache, which is everyone's reference, was not run"

    def _anew(self, cells: Sequence[Cell]) -> Iterator[str]:
        """The first examples of every run, computed on this machine."""
        with TemporaryDirectory() as folder:
            again = [replace(cell, limit=self.again * cell.samples, out=Path(folder)) for cell in cells]
            for run, ending in zip(self.runs, run_cells(again), strict=True):
                if ending.folder is None:
                    yield f"{run.run_id}: it could not be computed again ({ending.error})"
                    continue
                for theirs, ours in zip(run.samples, read_samples(ending.folder / FILE_NAME), strict=False):
                    if other := [name for name in _ANSWER if getattr(theirs, name) != getattr(ours, name)]:
                        yield f"{run.run_id}: example {ours.index}: computed again, its {other[0]} is another"
                        break


def _example(cell: Cell, prompt: Prompt, sample: Sample) -> str | None:
    """Why an example does not hold, if it does not."""
    if sample.error is not None:
        return f"it failed ({sample.error}), so that the run has no score"
    own = vars(blank(prompt))
    for name, sentence in _SET.items():
        if getattr(sample, name) != json.loads(json.dumps(own[name], default=vars)):
            return sentence
    if sample.output is None:
        return "it has no answer"
    score, measures = cell.task.judge(sample.output, prompt.example)
    if (sample.score, sample.measures or {}) != (score, json.loads(json.dumps(dict(measures)))):
        return f"its score is {sample.score}, and its answer scores {score}"
    return tokens_refused(cell, prompt, sample) or bytes_refused(cell, sample)


def _unlike(samples: Sequence[Sample]) -> str | None:
    """What holds as many tokens of as many takes as many bytes: in what two examples of a run differ there."""
    seen: dict[tuple[int, int], Sample] = {}
    for sample in samples:
        assert sample.kept_tokens is not None
        key = sample.prompt_tokens + (sample.decode_steps or 0), sum(map(sum, sample.kept_tokens))
        first = seen.setdefault(key, sample)
        if first.cache_bytes != sample.cache_bytes:
            return (
                f"example {sample.index}: it holds as many tokens as example {first.index} in {sample.cache_bytes} "
                f"bytes, not in {first.cache_bytes}"
            )
    return None
