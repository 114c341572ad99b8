"""Launchers that compute the runs of a sweep together: `hydra/launcher=kvbench` and `hydra/launcher=slurm`.

Runs of one model and task share their prefills and their decoding steps. A run that fails does not stop the others; the
table of all runs comes last, and the exit status is 1 if a run failed.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import Any

from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.errors import CompactHydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from hydra_plugins.kvbench.source import folders


class KvbenchLauncher(Launcher):
    """Composes all jobs of a sweep, groups them, and computes or submits the groups.

    fields: those of `kvbench.sweeps.jobs.Launcher`.
    """

    def __init__(self, **fields: Any) -> None:  # noqa: ANN401
        self.fields = {k: OmegaConf.to_container(v) if OmegaConf.is_config(v) else v for k, v in fields.items()}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what `launch` needs."""
        self.hydra_context, self.config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Compute every job; one `JobReturn` each, whose value is the score, or None if it was only submitted."""
        setup_globals()
        common = set(job_overrides[0]).intersection(*job_overrides[1:])
        configs = [self._composed(overrides) for overrides in job_overrides]
        from kvbench.sweeps.app import ready, short_errors

        ready()
        with short_errors():
            from kvbench.sweeps.jobs import Launcher as Fields  # torch is imported once the configurations are right
            from kvbench.sweeps.launch import run_sweep
            from kvbench.sweeps.plan import Asked

            found = folders()
            asked = [
                Asked(_title(overrides, common, config), plain(config), dict(config.hydra.runtime.choices), found)
                for overrides, config in zip(job_overrides, configs, strict=True)
            ]
            command = shlex.join(["python", "-m", "kvbench", *sys.argv[1:]])
            outcomes = run_sweep(asked, command, Fields(**self.fields))
        failed = sum(outcome.error is not None for outcome in outcomes)
        error = CompactHydraException(f"{failed} of {len(outcomes)} runs failed")
        returns = []
        for overrides, config, outcome in zip(job_overrides, configs, outcomes, strict=True):
            one = JobReturn(overrides=list(overrides), cfg=config, hydra_cfg=config, task_name="kvbench")
            one.return_value = outcome.score if outcome.error is None else error
            one.status = JobStatus.COMPLETED if outcome.error is None else JobStatus.FAILED
            returns.append(one)
        return returns

    def _composed(self, overrides: Sequence[str]) -> DictConfig:
        return self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))


def plain(config: DictConfig) -> dict[str, Any]:
    """A composed configuration as plain values, without Hydra's own node."""
    values = OmegaConf.to_container(
        OmegaConf.masked_copy(config, [key for key in config if key != "hydra"]), resolve=True
    )
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _title(overrides: Sequence[str], common: set[str], config: DictConfig) -> str:
    """The overrides that other jobs of the sweep do not have."""
    own = [word for word in overrides if word not in common]
    return " ".join(own) or f"policy={config.hydra.runtime.choices.policy}"
