"""What can be chosen: the groups of `conf/`, their files, and what is composed from parts without a file."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from hydra.core.config_store import ConfigStore

from kvbench.config.tree import find, load, names, part_class, read
from kvbench.terminal.close import close_names
from kvbench.terminal.errors import UsageError, refusing

GROUPS = ("model", "policy", "task", "logger", "launcher", "experiment")
LISTED = 30
"""So many names that --help has are repeated in a sentence."""


@cache
def choices(group: str) -> tuple[str, ...]:
    """The names of `group=` that have a file in `conf/<group>/`, sorted."""
    return names(group)


def check_choice(group: str, name: str, folders: Sequence[Path] = ()) -> None:
    """Raise UsageError, with what is allowed, unless `group=name` can be composed.

    folders: of --config-dir, which may hold files of the same groups.
    """
    file = find(group, name, folders)
    if file:
        if folders:  # of the user's own: what is wrong in it is said better here than by Hydra
            with refusing():
                load(file)
                if group in ("policy", "task") and "_target_" not in read(group, name, folders):
                    raise ValueError(f"{file} names no class: it needs a _target_, or a list of defaults that has one")
        return
    if group == "policy":
        _register_policy(name, folders)
    elif not (group == "task" and _register_named_task(name, folders)):
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


def _register_policy(name: str, folders: Sequence[Path]) -> None:
    """Let Hydra compose a policy that no file says, such as caote_knorm. Raises UsageError for an unknown name."""
    from kvbench.config.presets import policy_config  # imports torch, which --help need not wait for

    with refusing():
        ConfigStore.instance().store(group="policy", name=name, node=policy_config(name, folders))


def _register_named_task(name: str, folders: Sequence[Path]) -> bool:
    """Let Hydra compose `task=lm_eval/gsm8k` from `task=lm_eval`, whose class has a field for names of its own.

    False where there is no such task. Whether it knows the name, it finds out itself when it is built.
    """
    suite, _, own = name.partition("/")
    file = find("task", suite, folders)
    if not own or file is None or "_target_" not in (config := load(file)):
        return False
    field = getattr(part_class(config), "named_by", None)
    if field is None:
        return False
    node = {"defaults": [f"/task/{suite}@_here_", "_self_"], field: own, "name": name.replace("/", "_")}
    ConfigStore.instance().store(group=f"task/{suite}", name=own, node=node)
    return True
