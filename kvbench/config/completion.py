"""Completion of overrides on the command line: `policy.scorer.w` is continued as `policy.scorer.window=`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import click

from kvbench.config.compose import CONF, Config, find, load, names, read
from kvbench.config.parts import field_names, part_class
from kvbench.config.presets import named_config
from kvbench.errors import UsageError

GROUPS = ("model", "policy", "task", "logger", "experiment", "hydra/launcher", "hydra/sweeper")
PARTS = ("model", "policy", "task")


def complete_overrides(context: click.Context, _parameter: object, incomplete: str) -> list[str]:
    """The overrides that continue a word: fields of conf/config.yaml and of parts, and after `=` names. For click."""
    key, equals, value = incomplete.partition("=")
    words = [*context.args, *(word for given in context.params.values() if isinstance(given, tuple) for word in given)]
    if equals:
        given = value[: value.rfind(",") + 1]  # full,snap
        found = [f"{key}={given}{one}" for one in _values(key, value.removeprefix(given), words)]
    else:
        found = _fields(key, words)
    return [word for word in found if word.startswith(incomplete)]


def _values(key: str, value: str, words: Sequence[str]) -> Sequence[str]:
    """The names of a group, also those of a suite's own (`task=lm_eval/gsm8k`), or the allowed values of a field."""
    suite, slash, _ = value.partition("/")
    if key == "task" and slash and find("task", suite) is not None:
        own: Sequence[str] = part_class(read("task", suite)).own_names()
        return [f"{suite}/{name}" for name in own]
    if key in GROUPS:
        return names(key)
    *above, name = key.split(".")
    node = _part(above, words) if above else None
    hint = get_type_hints(part_class(node)).get(name) if node and "_target_" in node else None
    kinds = get_args(hint) if get_origin(hint) is Union else (hint,)
    literals = [str(one) for kind in kinds if get_origin(kind) is Literal for one in get_args(kind)]
    return [*literals, *["true", "false"] * (bool in kinds)]


def _fields(incomplete: str, words: Sequence[str]) -> list[str]:
    """The fields of a run, or those of a part below `policy.`, `task.` and `model.`."""
    *above, _ = incomplete.split(".")
    if above and above[0] in PARTS:
        node = _part(above, words) or {}
        known = [name for name in dict.fromkeys((*field_names(node), *node)) if not name.startswith("_")]
        path = ".".join(above)
        return [f"{path}.{name}{'.' if _is_part(node.get(name)) else '='}" for name in known if name != "name"]
    config = load(CONF / "config.yaml")
    fields = [key for key in config if key not in ("defaults", "hydra")]
    inner = {key: [f"{key}.{name}" for name in config[key]] for key in fields if isinstance(config[key], dict)}
    parts = [f"{group}." for group in PARTS if incomplete == group]
    return [*parts, *(f"{word}=" for field in (*GROUPS, *fields) for word in inner.get(field, [field]))]


def _part(path: Sequence[str], words: Sequence[str]) -> Config | None:
    """The configuration at a path (policy, scorer) of the names among the words; None if there is none."""
    defaults: dict[str, str] = {}
    for entry in load(CONF / "config.yaml")["defaults"]:
        defaults |= entry if isinstance(entry, dict) else {}
    chosen = {key: value.partition(",")[0] for key, _, value in (word.partition("=") for word in words)}
    try:
        node: Any = named_config(path[0], chosen.get(path[0], defaults.get(path[0], "")))
    except UsageError:
        return None
    for step in path[1:]:
        node = node.get(step) if isinstance(node, Mapping) else None
    return node if isinstance(node, dict) else None


def _is_part(value: object) -> bool:
    return isinstance(value, Mapping) and "_target_" in value
