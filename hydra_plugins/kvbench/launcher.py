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

    fields: see `kvbench.sweeps.jobs.Launcher`.
    """

    def __init__(self, **fields: Any) -> None:  # noqa: ANN401
        self.fields = {k: OmegaConf.to_container(v) if OmegaConf.is_config(v) else v for k, v in fields.items()}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep the inputs of `launch`."""
        self.hydra_context, self.config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Compute every job; the value of its `JobReturn` is the score, or None if it was only submitted."""
        setup_globals()
        loader = self.hydra_context.config_loader
        configs = [loader.load_sweep_config(self.config, list(overrides)) for overrides in job_overrides]
        from kvbench.sweeps.app import short_errors
        from kvbench.terminal.console import quiet, share_cores

        share_cores()
        quiet()
        with short_errors():
            from kvbench.sweeps.jobs import Launcher as Fields  # torch, which a wrong configuration does not need
            from kvbench.sweeps.launch import run_sweep
            from kvbench.sweeps.plan import Composed

            common = set(job_overrides[0]).intersection(*job_overrides[1:])
            composed = []
            for overrides, config in zip(job_overrides, configs, strict=True):
                choices = dict(config.hydra.runtime.choices)
                title = " ".join(word for word in overrides if word not in common) or f"policy={choices['policy']}"
                composed.append(Composed(title, plain(config), choices, folders()))
            command = shlex.join(["python", "-m", "kvbench", *sys.argv[1:]])
            found = run_sweep(composed, command, Fields(**self.fields))
        failed = sum(status.error is not None for status in found)
        error = CompactHydraException(f"{failed} of {len(found)} runs failed")
        returns = []
        for overrides, config, status in zip(job_overrides, configs, found, strict=True):
            one = JobReturn(overrides=list(overrides), cfg=config, hydra_cfg=config, task_name="kvbench")
            one.status = JobStatus.COMPLETED if status.error is None else JobStatus.FAILED
            one.return_value = status.score if status.error is None else error
            returns.append(one)
        return returns


def plain(config: DictConfig) -> dict[str, Any]:
    """A composed configuration as plain values, without Hydra's own node."""
    own = OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])
    values: Any = OmegaConf.to_container(own, resolve=True)
    return dict(values)
