"""Which of lm-eval's tasks a name means, without reading its 14,000 files of configuration as YAML (15 s here)."""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

_NAMES = re.compile(r"^[\"']?(?:task|group)[\"']?:[ \t]*[\"']?([^\s\"'#\[\]]+)", re.MULTILINE)
_TAGS = re.compile(r"^[\"']?tag[\"']?:((?:[ \t]*[^\s#]+)|(?:[ \t]*\n(?:[ \t]*-[ \t]*\S+[ \t]*\n?)+))", re.MULTILINE)


class _PlainLoader(yaml.CSafeLoader):
    """Plain YAML, in which lm-eval's `!function` is a word like any other."""


_PlainLoader.add_constructor("!function", lambda _, node: str(node.value))


def manager(name: str) -> Any:  # noqa: ANN401 - lm-eval's TaskManager
    """lm-eval's own task manager, knowing at least the task, group or tag `name` and all below it.

    Raises ValueError, with similar names, where there is no such task.
    """
    from lm_eval.tasks import TaskManager  # here: seconds that only these tasks have to wait for

    files = _files()
    if name not in files and name not in _tags():
        close = get_close_matches(name, [*files, *_tags()], n=3)
        instead = f", did you mean {' or '.join(close)}?" if close else ", `lm-eval ls tasks` lists them all"
        raise ValueError(f"lm-eval has no task {name}{instead}")
    folders = _folders(name)
    return TaskManager() if folders is None else TaskManager(include_path=[*folders], include_defaults=False)


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
def _texts() -> dict[Path, str]:
    """Every file of configuration, in the order in which lm-eval lets the first one have a name."""
    spec = find_spec("lm_eval")
    assert spec is not None, "lm-eval is a dependency"
    assert spec.origin is not None
    # What is included often has no suffix: `afriqa`, `_template_yaml`.
    paths = (path for path in (Path(spec.origin).parent / "tasks").rglob("*") if path.suffix in ("", ".yaml"))
    return {path: path.read_text(encoding="utf-8") for path in sorted(paths, key=Path.as_posix) if path.is_file()}


@cache
def _files() -> dict[str, Path]:
    """The file of each task and group."""
    found: dict[str, Path] = {}
    for path, text in _texts().items():
        if path.suffix == ".yaml":
            for name in _NAMES.findall(text):
                found.setdefault(name, path)
    return found


@cache
def _tags() -> frozenset[str]:
    """All names for several tasks at once."""
    words = (re.split(r"[\s,\[\]\"']+|-[ \t]", tags) for text in _texts().values() for tags in _TAGS.findall(text))
    return frozenset(word for found in words for word in found if word and word != "-")


def _folders(name: str) -> list[str] | None:
    """The folders with the files of a task, or of a group and all below it; None where a tag is among them."""
    found: set[Path] = set()
    asked = [name]
    while asked:
        one = asked.pop()
        path = _files().get(one)
        if path is None:
            return None
        found.add(path.parent)
        config = yaml.load(_texts()[path], Loader=_PlainLoader)
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
