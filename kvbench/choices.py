"""What can be chosen: the groups of `conf/`, their files, and policies composed from parts without a file."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache
from importlib import resources
from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from kvbench.errors import UsageError, refusing

LM_EVAL = "lm_eval/"
GROUPS = ("model", "policy", "task", "logger", "launcher", "experiment")
CONF = Path(str(resources.files("kvbench.conf")))


@cache
def choices(group: str) -> tuple[str, ...]:
    """The names of `group=` that have a file in `conf/<group>/`, sorted."""
    folder = CONF / group
    return tuple(sorted(str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.yaml")))


def check_choice(group: str, name: str, extra: Sequence[Path] = ()) -> None:
    """Raise UsageError, with what is allowed, unless `group=name` can be composed.

    extra: folders of --config-dir, which may hold files of the same groups.
    """
    if name in choices(group) or any((folder / group / f"{name}.yaml").is_file() for folder in extra):
        return
    if group == "policy":
        _register_policy(name)
    elif group == "task" and name.startswith(LM_EVAL):
        _register_lm_eval(name)
    else:
        raise UsageError(f"{group}={name} is unknown{did_you_mean(name, choices(group))}")


def did_you_mean(name: str, allowed: Sequence[str]) -> str:
    """The rest of a sentence about an unknown name: close matches, or else all that is allowed."""
    close = get_close_matches(name, allowed, n=3)
    listed = f"choose one of {', '.join(allowed)}"
    return f", did you mean {' or '.join(close)}? ({listed})" if close else f", {listed}"


def _register_policy(name: str) -> None:
    """Let Hydra compose a policy that no file says, such as caote_knorm. Raises UsageError for an unknown name."""
    from kvbench.presets import policy_config  # imports torch, which --help need not wait for

    with refusing():
        ConfigStore.instance().store(group="policy", name=name, node=policy_config(name))


def _register_lm_eval(name: str) -> None:
    """Let Hydra compose `task=lm_eval/<name there>` from `task=lm_eval`. Whether lm-eval has it, its task finds out."""
    node = OmegaConf.load(CONF / "task" / "lm_eval.yaml")
    node.task, node.name = name.removeprefix(LM_EVAL), name.replace("/", "_")
    ConfigStore.instance().store(group="task/lm_eval", name=node.task, node=node)
