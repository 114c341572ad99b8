"""config.yaml and environment.json of a run, written before its first example."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kvbench.engine.reading import label, policy_for, reads_whole
from kvbench.errors import UsageError
from kvbench.models.prompts import Prompt
from kvbench.results.environment import machine, other_versions
from kvbench.results.files import write_json, write_yaml
from kvbench.results.labels import names
from kvbench.run.run import Run

_ENVIRONMENT = "environment.json"

log = logging.getLogger(__name__)


def write_config(cell: Run, run_id: str, folder: Path, first: Prompt) -> None:
    """Write config.yaml: what is computed, by all its names. first: any prompt of the run."""
    naming = replace(cell.naming, reads=label(policy_for(cell.policy, first)) if reads_whole(first) else None)
    identity = cell.identity
    content = {
        "run_id": run_id,
        "names": names(naming, identity),
        "naming": {**asdict(naming), "changed": list(naming.changed)},
        "identity": identity,
        "checkpoint_dtype": str(cell.checkpoint.stored_dtype).removeprefix("torch."),
        "config": dict(cell.config),
    }
    write_yaml(folder / "config.yaml", content)


def environments(folder: Path) -> list[dict[str, Any]]:
    """The environments in which a run was computed so far: one, and another one for each change."""
    try:
        first = json.loads((folder / _ENVIRONMENT).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    return [first, *first.pop("resumed", [])]


def record_environment(cell: Run, folder: Path, here: Mapping[str, Any]) -> None:
    """Add this process's environment to those of `folder` if it is not among them.

    Raises UsageError if versions differ, which no run may mix unless `allow_version_mismatch` is set.
    """
    known = environments(folder)
    if here in known:
        return
    changed = other_versions(known, here)
    if changed and not cell.allow_version_mismatch:
        raise UsageError(
            f"{folder} was begun with other versions ({changed}), and a run that mixes them measures neither: "
            "go back to those, choose another out, or set allow_version_mismatch=true, which tables will show"
        )
    if told := _told(cell, known, here, changed):
        log.warning("%s: continued %s, see environment.json", cell.run_id, told)
    known.append(dict(here))
    write_json(folder / _ENVIRONMENT, {**known[0], **({"resumed": known[1:]} if known[1:] else {})})


def _told(cell: Run, known: Sequence[Mapping[str, Any]], here: Mapping[str, Any], changed: str) -> str:
    """What of an environment a reader of the numbers must know: where nothing is timed, threads are not."""
    if changed:
        return f"with other versions ({changed})"
    then, now = ([machine(one, threads=cell.rows == 1) for one in some] for some in (known, [here]))
    return "" if not known or now[0] in then else f"on {now[0]}, begun on {then[0]}"
