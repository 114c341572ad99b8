"""`logger=wandb`: Weights & Biases."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.report.trackers.wandb_settings import WandbSettings
from kvbench.report.trackers.watching import InThread, Quiet, SweepWatch


@dataclass(frozen=True)
class WandbLogger(WandbSettings):
    """Weights & Biases: a run per cell while it is computed, and one of the whole sweep."""

    def watch(self, sweep: str | None) -> SweepWatch:
        """The watch that sends to W&B from a thread of its own. Raises ValueError where W&B's settings cannot work."""
        known = self.resolved()
        if known.mode == "disabled":
            return Quiet()
        from kvbench.report.trackers.wandb_watch import WandbWatch  # here: wandb takes two seconds

        return InThread(WandbWatch(known, sweep), "wandb", self.patience)
