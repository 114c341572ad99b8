"""Trackers that are told of a finished run. The files in `out` stay the truth; a tracker gets a copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from kvbench.report.collect import COLUMNS
from kvbench.report.records import RunRecord


class Logger(Protocol):
    """Something that is told of every run that finished."""

    def log(self, run: RunRecord) -> None:
        """Take note of a finished run."""
        ...


@dataclass(frozen=True)
class NoLogger:
    """Nobody is told."""

    def log(self, run: RunRecord) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class WandbLogger:
    """Weights & Biases: the row of the tidy table as summary, and the samples as a table.

    mode: online, offline (files in `folder`, for `wandb sync`) or disabled. One W&B run per kvbench run: logging the
    same run again updates it.
    """

    project: str = "kvbench"
    mode: Literal["online", "offline", "disabled"] = "offline"
    folder: str = "."

    def __post_init__(self) -> None:
        if self.mode not in ("online", "offline", "disabled"):
            raise ValueError(f"logger.mode={self.mode} is not allowed, choose online, offline or disabled")

    def log(self, run: RunRecord) -> None:
        """Send the run's row and samples."""
        import wandb  # two seconds of import that runs without it need not pay

        budget = run.identity["budget"]
        row: dict[str, Any] = {column.name: column.value(run) for column in COLUMNS}
        with wandb.init(
            project=self.project,
            id=run.run_id,
            name=" ".join([run.names["policy"], *([] if budget is None else [str(budget)]), run.names["task"]]),
            resume="allow",
            mode=self.mode,
            dir=self.folder,
            config={"identity": run.identity, "environment": run.environment},
            settings=wandb.Settings(silent=True),
        ) as tracked:
            tracked.summary.update(row)
            table = wandb.Table(columns=["index", "prompt_tokens", "output", "references", "score", "error"])
            for s in run.samples:
                table.add_data(s.index, s.prompt_tokens, s.output, " | ".join(s.references), s.score, s.error)
            tracked.log({"samples": table})
