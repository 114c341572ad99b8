"""`logger=wandb`: logs runs to Weights & Biases."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from kvbench.errors import ConfigError, choice, from_extra, number
from kvbench.report.tracker import Opening, TrackerRun, Watch


@dataclass(frozen=True)
class WandbLogger:
    """The fields of conf/logger/wandb.yaml."""

    label: ClassVar[str] = "wandb"

    project: str = "kvbench"
    entity: str | None = None
    mode: str = "offline"
    tags: Sequence[str] = ()
    folder: str = "."
    patience: float = 60

    def __post_init__(self) -> None:
        choice("mode", self.mode, "offline", "online", "disabled")
        number("patience", self.patience, 0)
        if not isinstance(self.tags, list | tuple) or not all(isinstance(tag, str) for tag in self.tags):
            raise ConfigError("tags", self.tags, why="must be a list of texts: tags=[first,second]")

    def watch(self, sweep: str | None) -> Watch | None:
        """A callback that logs to W&B, None if it is disabled. Raises ConfigError for settings that W&B refuses.

        A finished run is logged again as the trial of a sweep of W&B, which needs its numbers.
        """
        if self.mode == "disabled":
            return None
        with from_extra("wandb", "logger=wandb"):
            import wandb  # imported here: it takes two seconds

        try:
            Path(self.folder).mkdir(parents=True, exist_ok=True)
            wandb.Settings(project=self.project, entity=self.entity, run_tags=tuple(self.tags))
        except OSError as error:
            raise ConfigError("folder", self.folder, why=f"cannot be created ({error.strerror})") from error
        except (ValueError, wandb.Error) as error:
            raise ConfigError("project", self.project, why=f"is refused by W&B: {error}") from error
        if self.mode == "online" and not wandb.login(verify=False, prompt=False):
            raise ConfigError("mode", "online", why="needs `wandb login`, or WANDB_API_KEY; or choose mode=offline")
        return Watch(partial(WandbRun, self), sweep, again=_trial)


class WandbRun(TrackerRun):
    """A run of W&B, new or continued."""

    def __init__(self, settings: WandbLogger, opening: Opening) -> None:
        import wandb

        env = os.environ
        plain = re.sub(r"[^A-Za-z0-9._=-]", "_", opening.run_id)[:53]  # an id has at most 64 characters
        given: dict[str, Any] = dict.fromkeys(("init_timeout", "finish_timeout"), settings.patience)
        given |= {"silent": True, "console": "off"}
        self._run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            mode="online" if settings.mode == "online" else "offline",
            dir=settings.folder,
            id=None if _trial() else f"{plain}-{opening.digest(settings.entity, settings.project)[:10]}",
            name=opening.title,
            group=env.get("WANDB_RUN_GROUP") or opening.sweep,
            job_type=opening.kind,
            tags=[*dict.fromkeys((*filter(None, env.get("WANDB_TAGS", "").split(",")), *settings.tags))],
            config=dict(opening.config),
            resume="allow" if settings.mode == "online" else None,
            reinit="create_new",
            settings=wandb.Settings(**given),
        )
        if opening.kind != "sweep":
            self._run.define_metric("*", summary="none")  # otherwise the running score stays after a failed example
        self.logged = self._run.starting_step if self._run.resumed else 0  # offline, all examples are logged again
        self._later: dict[str, Any] = {}

    def step(self, index: int, values: Mapping[str, Any]) -> None:
        """Log a point of the history."""
        self._run.log(dict(values), step=index)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Log a table in the summary."""
        import wandb

        self._later[name] = wandb.Table(list(columns), [list(row) for row in rows], allow_mixed_types=True)

    def figures(self, paths: Sequence[Path]) -> None:
        """Log images with the table of a sweep, as one point of the history."""
        import wandb

        self._run.log({**self._later, **{path.stem: wandb.Image(str(path)) for path in paths}})
        self._later = {}

    def finish(self, summary: Mapping[str, Any], error: str | None = None, interrupted: bool = False) -> None:
        """Log the summary, and finish with the exit code of a shell."""
        self._run.summary.update({**summary, **self._later})
        self._run.finish(exit_code=130 if interrupted else int(error is not None))


def _trial() -> bool:
    """Whether an agent of `wandb sweep` started this process: the run is then the one that the agent has chosen."""
    return bool(os.environ.get("WANDB_SWEEP_ID") and os.environ.get("WANDB_RUN_ID"))
