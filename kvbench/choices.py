"""What can be chosen: the groups of `conf/`, their files, and the policies composed from parts."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache
from importlib import resources
from pathlib import Path

from hydra.core.config_store import ConfigStore

from kvbench.errors import UsageError, refusing
from kvbench.presets import policy_config, preset_names

GROUPS = ("model", "policy", "task", "logger", "launcher", "experiment")
CONF = Path(str(resources.files("kvbench.conf")))


@cache
def choices(group: str) -> tuple[str, ...]:
    """The names `group=` takes, sorted: files of `conf/<group>/` and, for policies, compositions without a file."""
    folder = CONF / group
    files = {str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.yaml")}
    return tuple(sorted(files | set(preset_names() if group == "policy" else ())))


def check_choice(group: str, name: str, extra: Sequence[Path] = ()) -> None:
    """Raise UsageError, with what is allowed, unless `group=name` can be composed.

    extra: folders of --config-dir, which may hold files of the same groups.
    """
    if any((folder / group / f"{name}.yaml").is_file() for folder in extra):
        return
    if group == "policy":
        with refusing():
            _register_policy(name)
    elif name not in choices(group):
        raise UsageError(f"{group}={name} is unknown{did_you_mean(name, choices(group))}")


def did_you_mean(name: str, allowed: Sequence[str]) -> str:
    """The rest of a sentence about an unknown name: close matches, or else all that is allowed."""
    close = get_close_matches(name, allowed, n=3)
    listed = f"choose one of {', '.join(allowed)}"
    return f", did you mean {' or '.join(close)}? ({listed})" if close else f", {listed}"


def _register_policy(name: str) -> None:
    """Let Hydra compose `policy=name` where no file says it. Raises ValueError for an unknown name."""
    config = policy_config(name)
    if not (CONF / "policy" / f"{name}.yaml").is_file():
        ConfigStore.instance().store(group="policy", name=name, node=config)
