"""What `logger=wandb` is told: the fields of conf/logger/wandb.yaml, checked with W&B's own environment."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from kvbench.errors import ConfigError

if TYPE_CHECKING:
    import wandb

MODES = ("online", "offline", "disabled")
_SAME = {"dryrun": "offline", "run": "online"}  # older words of W&B's for its modes
_OF_ONE_RUN = ("WANDB_RUN_ID", "WANDB_NAME", "WANDB_RESUME")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WandbSettings:
    """Where W&B's runs go and how they are called.

    project, entity, mode: None takes WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE, or else `kvbench`, the user's own,
    `offline` (files for `wandb sync`). tags are added to WANDB_TAGS; all other variables of W&B hold as well, but for
    those that name one run. folder: where W&B's files lie. patience: seconds to wait at the end for what is not sent.
    """

    project: str | None = None
    entity: str | None = None
    mode: str | None = None
    tags: Sequence[str] = ()
    folder: str = "."
    patience: float = 600

    def __post_init__(self) -> None:
        if self.mode is not None and self.mode not in MODES:
            raise ConfigError("mode", self.mode, why="is not allowed, choose online, offline or disabled")
        if not isinstance(self.tags, list | tuple) or not all(isinstance(tag, str) for tag in self.tags):
            raise ConfigError("tags", self.tags, why="must be a list of texts: tags=[first,second]")
        if not self.folder.strip():
            raise ConfigError("folder", self.folder, why="is not allowed, it must be a folder")
        if not self.patience >= 0:
            raise ConfigError("patience", self.patience, why="must be a number of seconds, at least 0")

    def resolved(self) -> Self:
        """These settings with every None filled in from the environment. Raises ValueError where they cannot work."""
        mode = self.mode or _mode_of_environment()
        if mode == "disabled":
            return replace(self, mode=mode)
        given = {"project": self.project, "entity": self.entity}
        found = environment({name: value for name, value in given.items() if value is not None}, self.tags)
        try:
            Path(self.folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                "folder", self.folder, why=f"cannot be made ({error.strerror}), choose another"
            ) from error
        if mode == "online":
            _check_login()
        for name in _OF_ONE_RUN:
            if os.environ.get(name):
                log.warning("%s is not used: each cell is a W&B run with a name and an id of its own", name)
        return replace(
            self,
            mode=mode,
            project=found.project or "kvbench",
            entity=found.entity,
            tags=tuple(dict.fromkeys((*(environment().run_tags or ()), *self.tags))),
        )


def environment(fields: Mapping[str, Any] | None = None, tags: Sequence[str] = ()) -> wandb.Settings:
    """What WANDB_* variables, W&B's own settings files and some fields say. ValueError for what W&B refuses."""
    import wandb  # two seconds, which runs without it need not pay

    try:
        found = wandb.setup().settings.model_copy()
        found.update_from_dict({**(fields or {}), **({"run_tags": tuple(tags)} if tags else {})})
    except (ValueError, wandb.Error) as error:
        said = [line.strip() for line in str(error).splitlines()]
        about = f"{said[1]}: {said[2].partition(' [type=')[0]}" if len(said) > 2 else said[0]
        raise ValueError(f"W&B refuses its settings: {about}") from error
    return found


def _mode_of_environment() -> str:
    if os.environ.get("WANDB_DISABLED", "").lower() in ("1", "true", "yes"):
        return "disabled"
    given = os.environ.get("WANDB_MODE") or "offline"
    mode = _SAME.get(given, given)
    if mode not in MODES:
        raise ValueError(f"WANDB_MODE={given} is not allowed, choose online, offline or disabled")
    return mode


def _check_login() -> None:
    """ValueError where nobody is logged in; whether the server knows the key only it can say, once a run starts."""
    import wandb

    try:
        known = wandb.login(verify=False, prompt=False)
    except wandb.Error as error:
        raise ConfigError("mode", "online", why=f": {str(error).splitlines()[0]}") from error
    if not known:
        raise ConfigError(
            "mode", "online", why="needs a login: run `wandb login`, set WANDB_API_KEY, or choose mode=offline"
        )
