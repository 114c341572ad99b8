"""Which of lm-eval's tasks a name means, without reading its 14,000 files of configuration as YAML (15 s here)."""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from os.path import expanduser
from pathlib import Path
from typing import Any

import yaml

from kvbench.errors import ConfigError

_NAMES = re.compile(r"^[\"']?(?:task|group)[\"']?:[ \t]*[\"']?([^\s\"'#\[\]]+)", re.MULTILINE)
_TAGS = re.compile(r"^[\"']?tag[\"']?:((?:[ \t]*[^\s#]+)|(?:[ \t]*\n(?:[ \t]*-[ \t]*\S+[ \t]*\n?)+))", re.MULTILINE)


class _PlainLoader(yaml.CSafeLoader):
    """Plain YAML, in which lm-eval's `!function` is a word like any other."""


_PlainLoader.add_constructor("!function", lambda _, node: str(node.value))


def manager(name: str, include_path: str | None = None) -> Any:  # noqa: ANN401 - lm-eval's TaskManager
    """lm-eval's own task manager, knowing at least the task, group or tag `name` and all below it.

    include_path: a folder with task files that lm-eval does not have. Raises ValueError, with similar names, where
    there is no such task.
    """
    from lm_eval.tasks import TaskManager  # here: seconds that only these tasks have to wait for

    own = None if include_path is None else Path(expanduser(include_path))
    files, tags = _files(own), _tags(own)
    if name not in files and name not in tags:
        close = get_close_matches(name, [*files, *tags], n=3)
        instead = f", did you mean {' or '.join(close)}?" if close else ", `lm-eval ls tasks` lists them all"
        nor = "" if own is None else f", nor has include_path={include_path}"
        raise ValueError(f"lm-eval has no task {name}{nor}{instead}")
    folders = _folders(name, own)
    if folders is None:
        return TaskManager(include_path=None if own is None else str(own))
    return TaskManager(include_path=[*folders], include_defaults=False)


def digest(include_path: str) -> str:
    """What stands for a folder of task files in an identity: their contents, and of all YAML and Python beside them.

    Raises ValueError where there is no such folder.
    """
    own = Path(expanduser(include_path))
    if not own.is_dir():
        raise ConfigError(
            "include_path", include_path, why="is not a folder, it must hold task files as lm-eval has them"
        )
    folders = {own, *(path.parent for path in _files(own).values() if path.is_relative_to(own))}
    beside = sorted(path for folder in folders for path in folder.iterdir() if path.suffix in ("", ".yaml", ".py"))
    contents = b"".join(sha256(path.read_bytes()).digest() for path in beside if path.is_file())
    return f"sha256:{sha256(contents).hexdigest()[:16]}"


def asked_splits(known: Any, name: str) -> set[str]:  # noqa: ANN401 - lm-eval's TaskManager
    """The splits whose rows the task `name`, or all below it, are scored on."""
    entry = known.task_index.get(name)
    if entry is None:
        return set()
    config = entry.cfg or {}
    below = [*_children(config), *(() if config else entry.tags)]
    if below:
        return set().union(*(asked_splits(known, one) for one in below))
    return {split for split in [config.get("test_split") or config.get("validation_split")] if split}


@cache
def _texts(own: Path | None = None) -> dict[Path, str]:
    """Every file of configuration, in the order in which the first one has a name: those of the folder `own` first."""
    if own is not None:
        return {**_read(own), **_texts()}
    spec = find_spec("lm_eval")
    assert spec is not None, "lm-eval is a dependency"
    assert spec.origin is not None
    return _read(Path(spec.origin).parent / "tasks")


def _read(folder: Path) -> dict[Path, str]:
    # What is included often has no suffix: `afriqa`, `_template_yaml`.
    paths = (path for path in folder.rglob("*") if path.suffix in ("", ".yaml"))
    return {path: path.read_text(encoding="utf-8") for path in sorted(paths, key=Path.as_posix) if path.is_file()}


@cache
def _files(own: Path | None = None) -> dict[str, Path]:
    """The file of each task and group."""
    found: dict[str, Path] = {}
    for path, text in _texts(own).items():
        if path.suffix == ".yaml":
            for name in _NAMES.findall(text):
                found.setdefault(name, path)
    return found


@cache
def _tags(own: Path | None = None) -> frozenset[str]:
    """All names for several tasks at once."""
    words = (re.split(r"[\s,\[\]\"']+|-[ \t]", tags) for text in _texts(own).values() for tags in _TAGS.findall(text))
    return frozenset(word for found in words for word in found if word and word != "-")


def _folders(name: str, own: Path | None) -> list[str] | None:
    """The folders with the files of a task, or of a group and all below it; None where a tag is among them."""
    found: set[Path] = set()
    asked = [name]
    while asked:
        one = asked.pop()
        path = _files(own).get(one)
        if path is None:
            return None
        found.add(path.parent)
        config = yaml.load(_texts(own)[path], Loader=_PlainLoader)
        asked.extend(_children(config))
    return [str(folder) for folder in sorted(found) if not any(above in found for above in folder.parents)]


def _children(config: dict[str, Any]) -> list[str]:
    """The names in the list of a group; a group written out in it is replaced by its own list."""
    names: list[str] = []
    members = config.get("task")
    for member in members if isinstance(members, list) else []:
        if isinstance(member, str):
            names.append(member)
        elif "group" in member and isinstance(member.get("task"), list):
            names += _children(member)
        else:
            names.append(str(member.get("task") or member.get("group")))
    return names
