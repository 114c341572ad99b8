"""lm-eval's TaskManager for one name: its index of all 14,000 files takes 15 seconds, the folder of one task none."""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import cache
from hashlib import sha256
from importlib.resources import files
from os.path import expanduser
from pathlib import Path
from typing import Any

from kvbench.errors import ConfigError


def manager(name: str, include_path: str | None = None) -> Any:  # noqa: ANN401 - lm-eval's TaskManager
    """lm-eval's task manager that knows the task, group or tag `name` and all below it.

    include_path: a folder with task files of your own. Raises ValueError, with similar names, for an unknown name.
    """
    from lm_eval.tasks import TaskManager  # here: seconds that only these tasks have to wait for

    own: list[str | Path] = [] if include_path is None else [str(Path(expanduser(include_path)))]
    for folders in (own, [*own, *_folder(name)]):
        if folders:
            known = TaskManager(include_path=folders, include_defaults=False)
            if _complete(known, name):
                return known
    known = TaskManager(include_path=own or None)
    if name not in known.task_index:
        close = get_close_matches(name, list(known.task_index), n=3)
        instead = f", did you mean {' or '.join(close)}?" if close else ", `lm-eval ls tasks` lists them all"
        nor = "" if include_path is None else f", nor has include_path={include_path}"
        raise ValueError(f"lm-eval has no task {name}{nor}{instead}")
    return known


def digest(include_path: str) -> str:
    """A digest of the task files of a folder, and of the YAML and Python files in it, for a run's identity.

    Raises ValueError if there is no such folder.
    """
    own = Path(expanduser(include_path))
    if not own.is_dir():
        raise ConfigError(
            "include_path", include_path, why="is not a folder, it must hold task files as lm-eval has them"
        )
    tasks = re.compile(r"^[\"']?(?:task|group|tag)[\"']?: *\S", re.MULTILINE)
    named = (path for path in own.rglob("*.yaml") if tasks.search(path.read_text(encoding="utf-8")))
    folders = {own, *(path.parent for path in named)}
    beside = sorted(path for folder in folders for path in folder.iterdir())
    those = (path for path in beside if path.suffix in ("", ".yaml", ".py") and path.is_file())
    contents = b"".join(sha256(path.read_bytes()).digest() for path in those)
    return f"sha256:{sha256(contents).hexdigest()[:16]}"


@cache
def _folder(name: str) -> list[str]:
    """The folder of lm-eval's tasks whose file defines `name` as a task or group; [] if there is none."""
    defines = re.compile(
        rf"^[\"']?(?:task|group)[\"']?:[ \t]*[\"']?{re.escape(name)}[\"']?[ \t]*(?:#.*)?$", re.MULTILINE
    )
    for path in sorted(Path(str(files("lm_eval"))).joinpath("tasks").rglob("*.yaml")):
        if defines.search(path.read_text(encoding="utf-8")):
            return [str(path.parent)]
    return []


def _complete(known: Any, name: str) -> bool:  # noqa: ANN401 - lm-eval's TaskManager
    """Whether a name and all members of its groups are known."""
    entry = known.task_index.get(name)
    members = (entry.cfg or {}).get("task") if entry is not None else None
    names = [member for member in members if isinstance(member, str)] if isinstance(members, list) else []
    return entry is not None and bool(entry.cfg) and all(_complete(known, one) for one in names)
