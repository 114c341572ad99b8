"""`logger=mlflow`: logs runs to MLflow."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from kvbench.errors import ConfigError, first_line
from kvbench.report.tracker import Opening, TrackerRun, Watch, numbers, package

_IDENTITY = "kvbench.identity"


@dataclass(frozen=True)
class MlflowLogger:
    """The fields of conf/logger/mlflow.yaml."""

    label: ClassVar[str] = "mlflow"

    experiment: str = "kvbench"
    tracking_uri: str | None = None

    def watch(self, sweep: str | None) -> Watch:
        """A callback that logs to MLflow. Raises UsageError if it is not installed or refuses the settings."""
        mlflow: Any = package("mlflow", "mlflow", self.label)
        try:
            client = mlflow.MlflowClient(tracking_uri=self.tracking_uri)
            found = client.get_experiment_by_name(self.experiment)
            experiment = found.experiment_id if found else client.create_experiment(self.experiment)
        except Exception as error:  # a missing driver, an unknown scheme, a server that does not answer
            why = f"cannot be used by MLflow: {first_line(error)}"
            raise ConfigError("tracking_uri", self.tracking_uri, why=why) from error
        return Watch(partial(MlflowRun, client, experiment), sweep)


class MlflowRun(TrackerRun):
    """A run of MLflow, new or continued."""

    def __init__(self, client: Any, experiment: str, opening: Opening) -> None:  # noqa: ANN401 - without types
        self._client, identity = client, opening.digest()
        found = client.search_runs([experiment], f"tags.`{_IDENTITY}` = '{identity}'")
        if found:
            self._id = found[0].info.run_id
            client.update_run(self._id, status="RUNNING")
            self.logged = len(client.get_metric_history(self._id, "n_failed"))  # a metric of every example
            return
        tags = {_IDENTITY: identity, "task": opening.kind, **({"sweep": opening.sweep} if opening.sweep else {})}
        self._id = client.create_run(experiment, tags=tags, run_name=opening.title).info.run_id
        for name, value in opening.config.items():
            client.log_param(self._id, name, str(value)[:6000])  # as many characters as MLflow takes

    def step(self, index: int, values: Mapping[str, Any]) -> None:
        """Log metrics."""
        self._log(numbers(values), index)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Log a table as an artifact."""
        values = {"columns": list(columns), "data": [list(row) for row in rows]}
        self._client.log_dict(self._id, values, f"{name}.json")

    def figures(self, paths: Sequence[Path]) -> None:
        """Log pictures as artifacts."""
        for path in paths:
            self._client.log_artifact(self._id, str(path), "figures")

    def finish(self, summary: Mapping[str, Any], error: str | None = None, interrupted: bool = False) -> None:
        """Log the summary as metrics, and the state of the run."""
        self._log({f"summary/{name}": value for name, value in numbers(summary).items()}, 0)
        if error is not None:
            self._client.set_tag(self._id, "error", error[:5000])  # as many characters as MLflow takes
        self._client.set_terminated(self._id, "KILLED" if interrupted else "FAILED" if error else "FINISHED")

    def _log(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self._id, metrics=[Metric(name, value, now, step) for name, value in values.items()])
