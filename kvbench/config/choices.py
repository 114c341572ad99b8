"""What can be chosen: the groups of `conf/`, their files, and what is composed from parts without a file."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from kvbench.config.tree import Config, find, load, names, part_class, read
from kvbench.errors import UsageError
from kvbench.terminal.close import close_names
from kvbench.terminal.errors import refusing

GROUPS = ("model", "policy", "task", "logger", "launcher", "experiment")
LISTED = 30
"""So many names that --help has are repeated in a sentence."""


@cache
def choices(group: str) -> tuple[str, ...]:
    """The names of `group=` that have a file in `conf/<group>/`, sorted."""
    return names(group)


def chosen(group: str, name: str, folders: Sequence[Path] = ()) -> Config:
    """What stands under `group` where it is chosen as `name`. Raises UsageError, with what is allowed.

    folders: of --config-dir, which may hold files of the same groups.
    """
    with refusing():
        if file := find(group, name, folders):
            config = read(group, name, folders)
            if group in ("policy", "task") and "_target_" not in config:
                raise UsageError(f"{file} names no class: it needs a _target_, or a list of defaults that has one")
            return config
        if group == "policy":
            from kvbench.config.presets import policy_config  # imports torch, which --help need not wait for

            return policy_config(name, folders)
        if group == "task" and (named := _named_task(name, folders)):
            return named
    known = names(group, folders)
    elsewhere = group == "task" and "/" not in name and not close_names(name, known)
    more = f"; those of lm-eval are chosen as task=lm_eval/{name}" if elsewhere else ""
    raise UsageError(f"{group}={name} is unknown{did_you_mean(name, known, in_help=True)}{more}")


def did_you_mean(name: str, allowed: Sequence[str], in_help: bool = False) -> str:
    """The rest of a sentence about an unknown name: close matches, and all that is allowed.

    in_help: --help has these names, so that many of them need not be repeated.
    """
    if not allowed:
        return ", there is none to set"
    close = close_names(name, allowed)
    many = in_help and len(allowed) > LISTED
    listed = f"--help lists all {len(allowed)}" if many else f"choose one of {', '.join(allowed)}"
    return f", did you mean {' or '.join(close)}? ({listed})" if close else f", {listed}"


def _named_task(name: str, folders: Sequence[Path]) -> Config | None:
    """`task=lm_eval/gsm8k`: the file `lm_eval`, whose class has a field for names of its own; None for other names.

    Whether the task knows the name, it finds out itself when it is built.
    """
    suite, _, own = name.partition("/")
    file = find("task", suite, folders)
    if not own or file is None or "_target_" not in load(file):
        return None
    config = read("task", suite, folders)
    field = getattr(part_class(config), "named_by", None)
    return None if field is None else {**config, field: own, "name": name.replace("/", "_")}
