"""`logger=tensorboard`: writes runs as files of TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from kvbench.report.tracker import Opening, TrackerRun, Watch, numbers, package


@dataclass(frozen=True)
class TensorBoardLogger:
    """The fields of conf/logger/tensorboard.yaml."""

    label: ClassVar[str] = "tensorboard"

    folder: str = "tensorboard"

    def watch(self, sweep: str | None) -> Watch:
        """A callback that writes below `folder`. Raises UsageError if tensorboard is not installed."""
        package("torch.utils.tensorboard", "tensorboard", self.label)
        return Watch(partial(TensorBoardRun, Path(self.folder)), sweep)


class TensorBoardRun(TrackerRun):
    """The files of one run; an interrupted run is written again from its first example."""

    def __init__(self, folder: Path, opening: Opening) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / opening.run_id), purge_step=0)  # hides what was written before
        self._config = opening.config

    def step(self, index: int, values: Mapping[str, Any]) -> None:
        """Write scalars."""
        for name, value in numbers(values).items():
            self._writer.add_scalar(name, value, index)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Write a Markdown table."""
        lines = [columns, ["---"] * len(columns), *rows]
        self._writer.add_text(name, "\n".join("|" + "|".join(map(_cell, line)) + "|" for line in lines))

    def figures(self, paths: Sequence[Path]) -> None:
        """Write images."""
        from matplotlib.image import imread

        for path in paths:
            self._writer.add_image(path.stem, imread(path), dataformats="HWC")

    def finish(self, summary: Mapping[str, Any], error: str | None = None, interrupted: bool = False) -> None:
        """Write the configuration and the summary for the HPARAMS page, and why the run failed."""
        if error is not None:
            self._writer.add_text("error", error)
        config = {k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in self._config.items()}
        final = {f"summary/{name}": value for name, value in numbers(summary).items()}
        self._writer.add_hparams(config, final, run_name=".")
        self._writer.close()


def _cell(value: object) -> str:
    """A value in one cell of a Markdown table."""
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")
