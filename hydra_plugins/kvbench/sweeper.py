"""`hydra/sweeper=grids`: sweeps that are not one product of values, such as the runs of a paper's table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper  # its reading of overrides has no public name
from hydra.core.utils import JobReturn
from omegaconf import OmegaConf

Grid = Mapping[str, Any]


class GridSweeper(BasicSweeper):
    """Hydra's sweeper for a list of grids, each with its own fields, in one launch.

    grids: of each field its value, or a list of values; None: the values of the command line are the only grid.
    The launcher composes each job once and refuses wrong ones before it computes any.
    """

    def __init__(
        self,
        grids: Sequence[Grid] | None = None,
        params: dict[str, str] | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__(max_batch_size, params)
        plain: Any = OmegaConf.to_container(grids) if OmegaConf.is_config(grids) else grids
        self.grids: list[Grid] = plain or []

    def sweep(self, arguments: list[str]) -> Any:  # noqa: ANN401 - as Hydra has it
        """Launch the jobs of all grids together; their returns."""
        launcher, self.launcher = self.launcher, _Collector()
        for line in narrowed(self.grids, arguments):
            self.batch_index = 0
            super().sweep(line)
        jobs, self.launcher = self.launcher.jobs, launcher
        size = self.max_batch_size or len(jobs)
        returns = []
        for start in range(0, len(jobs), size):
            returns.append(launcher.launch(jobs[start : start + size], initial_job_idx=start))
        for one in (one for batch in returns for one in batch):
            _ = one.return_value  # raises the error of a job that failed
        return returns

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Nothing: the launcher composes every job before it runs the first one."""


class _Collector:
    """Collects the jobs that `BasicSweeper` would launch."""

    def __init__(self) -> None:
        self.jobs: list[Sequence[str]] = []

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        self.jobs += job_overrides
        return []


def narrowed(grids: Sequence[Grid], arguments: Sequence[str]) -> list[list[str]]:
    """The overrides of every grid, joined with the command line.

    Values of the command line that the grids have select among theirs; other values replace them. Fields that no grid
    has are added to all. Where another choice replaces the grid's (`task=niah`), the grid's fields of the replaced one
    (`task.extended`) are left out.
    """
    if not grids:
        return [list(arguments)]
    left: list[dict[str, list[str]]] = [{key: _words(value) for key, value in grid.items()} for grid in grids]
    others = []
    named = {argument.partition("=")[0] for argument in arguments}
    for argument in arguments:
        key, _, text = argument.partition("=")
        given, known = text.split(","), {word for grid in left for word in grid.get(key, ())}
        if not known:
            others.append(argument)
        elif known.issuperset(given):
            left = [{**grid, **({key: [w for w in grid[key] if w in given]} if key in grid else {})} for grid in left]
            left = [grid for grid in left if key not in grid or grid[key]]
        else:
            left = [_replaced(grid, key, given, named) if key in grid else grid for grid in left]
    lines = [[f"{key}={','.join(words)}" for key, words in grid.items()] + others for grid in left]
    return list({" ".join(line): line for line in lines}.values())


def _replaced(grid: Mapping[str, list[str]], key: str, given: list[str], named: set[str]) -> dict[str, list[str]]:
    """A grid with other values of one key, without the fields below it that the command line does not name."""
    return {k: v for k, v in grid.items() if not k.startswith(f"{key}.") or k in named} | {key: given}


def _words(value: Any) -> list[str]:  # noqa: ANN401 - whatever YAML holds
    """The values of a field as a command line has them; a list is a list of values."""
    return [_word(one) for one in value] if isinstance(value, list) else [_word(value)]


def _word(value: Any) -> str:  # noqa: ANN401
    if isinstance(value, list):
        return f"[{','.join(map(_word, value))}]"
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
