"""`logger=wandb`: logs runs to Weights & Biases while they are computed, and a sweep's table and figures."""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from kvbench.errors import ConfigError, UsageError, choice, number
from kvbench.results.columns import COLUMNS
from kvbench.results.definition import folder_identity
from kvbench.results.labels import compressed, flat, moments, names
from kvbench.results.metrics import mean_kept, running
from kvbench.results.result import Result, Results, read_result
from kvbench.results.samples import Sample
from kvbench.run.run import Run

if TYPE_CHECKING:
    import wandb

_INTERVALS = 32  # number of running intervals of a run: each is a bootstrap, too slow for every example
_MEASURED = (
    *("score", "prompt_tokens", "generated_tokens", "cache_bytes", "peak_bytes", "spare_bytes", "device_peak_bytes"),
    *("prefill_seconds", "decode_seconds"),
)
_EXAMPLE = (
    *("index", "sample", "prompt_hash", "depth", "length", "prompt_tokens", "output", "references", "score", "nll"),
    *("kept_tokens", "cache_bytes", "peak_bytes", "error"),
)

Logged: TypeAlias = Run | Result
"""A run that is computed, or one that is stored."""

log = logging.getLogger(__name__)


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

    def watch(self, sweep: str | None) -> WandbWatch | None:
        """A callback that logs to W&B, None if it is disabled. Raises ConfigError for settings that W&B refuses."""
        if self.mode == "disabled":
            return None
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
        return WandbWatch(self, sweep)


class WandbWatch:
    """Logs runs to W&B while they are computed; the caller catches errors.

    A complete run stays open until its difference from the full cache is known, or until `close`.
    """

    def __init__(self, settings: WandbLogger, sweep: str | None) -> None:
        self._settings, self._sweep = settings, sweep
        self._open: dict[str, tuple[wandb.Run, list[Sample]]] = {}  # by run_id: W&B's run, and the logged examples
        self._complete: list[Result] = []

    def started(self, cell: Logged, done: Sequence[Sample], total: int) -> None:
        """Start a W&B run, or continue an interrupted one."""
        labels, evicts_decodes = names(cell.naming, cell.identity), moments(cell.identity)
        budget = [] if cell.identity["budget"] is None else [str(cell.identity["budget"])]
        config = {
            **flat({key: value for key, value in cell.identity.items() if key != "version"}),
            "run_id": cell.run_id,
            "compress": compressed(cell.identity),
            **{name: getattr(cell.naming, name) for name in ("model", "policy", "task")},
            **dict(zip(("schedule", "decode"), evicts_decodes, strict=True)),
        }
        title = " ".join([labels["model"], labels["policy"], *budget, labels["task"]])
        run = self._init(cell.folder.parent, cell.run_id, title, cell.naming.task, config)
        run.define_metric("*", summary="none")  # otherwise the running score stays after a failed example
        logged = run.starting_step if run.resumed else 0  # offline, all examples are logged again
        self._open[cell.run_id] = run, list(done[:logged])
        for sample in done[logged:]:
            self.finished(cell, sample)

    def finished(self, cell: Logged, sample: Sample) -> None:
        """Log an example."""
        run, samples = self._open[cell.run_id]
        samples.append(sample)
        run.log(history_row(samples), step=len(samples) - 1)

    def ended(self, cell: Logged, error: Exception | None) -> None:
        """Log the summary of a complete run, or an error.

        A run without new examples is not logged again, except as the trial of a sweep of W&B, which needs its numbers.
        """
        if cell.run_id not in self._open:
            if error is not None or not _trial():
                return
            stored = read_result(cell.folder).samples
            self.started(cell, stored, len(stored))
        if error is not None:
            run, _ = self._open.pop(cell.run_id)
            run.summary["error"] = f"{type(error).__name__}: {error}"
            run.finish(exit_code=1)
            return
        self._complete.append(read_result(cell.folder))
        for result in Results(self._complete):
            if result.baseline is not None or result.is_full:
                self._finish(result)

    def close(self, records: Sequence[Result] = ()) -> None:
        """Finish all W&B runs. records: all runs of the sweep, to log their table and figures."""
        for result in Results([*records, *self._complete]):
            self._finish(result)
        for run, _ in self._open.values():  # interrupted
            run.finish(exit_code=130)
        self._open.clear()
        if records and self._sweep is not None:
            name, results = f"sweep-{self._sweep}", Results(records)
            run = self._init(results[0].folder.parent, name, name, "sweep", {"runs": len(results)})
            table = _table([c.name for c in COLUMNS], [[c.value(row) for c in COLUMNS] for row in results])
            with tempfile.TemporaryDirectory() as folder:
                run.log({"table": table, **_figures(results, Path(folder))})
            run.finish()

    def _init(self, out: Path, run_id: str, title: str, kind: str, config: dict[str, Any]) -> wandb.Run:
        """out: the folder of the run; equal runs of two folders are two runs of W&B."""
        import wandb

        settings, env = self._settings, os.environ
        plain = re.sub(r"[^A-Za-z0-9._=-]", "_", run_id)
        place = sha256(f"{settings.entity} {settings.project} {folder_identity(out)} {run_id}".encode()).hexdigest()
        given: dict[str, Any] = dict.fromkeys(("init_timeout", "finish_timeout"), settings.patience)
        given |= {"silent": True, "console": "off"}
        return wandb.init(
            project=settings.project,
            entity=settings.entity,
            mode="online" if settings.mode == "online" else "offline",
            dir=settings.folder,
            id=None if _trial() else f"{plain[:53]}-{place[:10]}",  # at most 64 characters; None: WANDB_RUN_ID
            name=title,
            group=env.get("WANDB_RUN_GROUP") or self._sweep,
            job_type=kind,
            tags=[*dict.fromkeys((*filter(None, env.get("WANDB_TAGS", "").split(",")), *settings.tags))],
            config=config,
            resume="allow" if settings.mode == "online" else None,
            reinit="create_new",
            settings=wandb.Settings(**given),
        )

    def _finish(self, result: Result) -> None:
        """Log the summary and the table of examples of a complete run and finish it, once."""
        if result.run_id in self._open:
            run, _ = self._open.pop(result.run_id)
            run.summary.update(_known({column.name: column.value(result) for column in COLUMNS}))
            run.summary["examples"] = _table(*example_table(result.samples))
            run.finish(exit_code=1 if result.n_failed else 0)


def _trial() -> bool:
    """Whether an agent of `wandb sweep` started this process: the run is then the one that the agent has chosen."""
    return bool(os.environ.get("WANDB_SWEEP_ID") and os.environ.get("WANDB_RUN_ID"))


def history_row(samples: Sequence[Sample]) -> dict[str, Any]:
    """The numbers of the last example under `example/`, and running means under the names of the tidy table.

    After a failed example there is no running score, as in the table.
    """
    n, last = len(samples), samples[-1]
    row = {f"example/{name}": getattr(last, name) for name in _MEASURED}
    row |= {"example/nll": last.likelihood and last.likelihood.nll, "example/kept_tokens": mean_kept(last)}
    row |= running(samples, bounded=n % max(1, n // _INTERVALS) == 0)
    return _known({**row, "n_failed": sum(sample.error is not None for sample in samples)})


def example_table(samples: Sequence[Sample]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of the table of examples; `sample` numbers several answers to one prompt."""
    columns = [name for name in _EXAMPLE if name != "sample" or any(one.sample is not None for one in samples)]
    rows = []
    for sample in samples:
        values = {**vars(sample), **{name: sample.metadata.get(name) for name in ("depth", "length")}}
        values |= {"references": " | ".join(sample.references), "kept_tokens": mean_kept(sample)}
        values["nll"] = sample.likelihood and sample.likelihood.nll
        rows.append([values[name] for name in columns])
    return columns, rows


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values without None, NaN and infinities."""
    return {k: v for k, v in values.items() if v is not None and not (isinstance(v, float) and not isfinite(v))}


def _table(columns: Sequence[str], rows: Sequence[Iterable[Any]]) -> wandb.Table:
    import wandb

    return wandb.Table(list(columns), list(rows), allow_mixed_types=True)


def _figures(results: Sequence[Result], folder: Path) -> dict[str, wandb.Image]:
    """All figures that have data, by name. They are written to `folder`."""
    import wandb

    from kvbench.report.figures import panels, pictures  # imported here: matplotlib takes a second

    try:
        paths = pictures.draw(pictures.ALL, panels.once(results), folder, ".png")
    except UsageError as error:
        log.info("no figure for W&B: %s", error)
        return {}
    return {path.stem: wandb.Image(str(path)) for path in paths}
