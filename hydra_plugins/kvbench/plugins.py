"""Hydra's plugins of kvbench: composed names, launchers and the sweeper of grids.

`KvbenchSource` has the configurations of models, policies and tasks, including names without a file:
`policy=caote_knorm` and `policy=snapkv_kivi_g32` are composed of several files, `task=lm_eval/gsm8k` names a task of
lm-eval, `model=/folder` is a folder. A part may leave fields to the defaults of its class, so these nodes are open:
`policy.scorer.window=16` needs no `+`; an unknown field is refused when the part is built.

`KvbenchLauncher` (`hydra/launcher=kvbench`, `slurm`) computes the runs of a sweep together: runs of one model and task
share their prefills and their decoding steps. A run that fails does not stop the others; the table of all runs comes
last, and the exit status is 1 if a run failed.

Hydra imports this module at each start of any of its applications, so kvbench is imported inside functions.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper  # its reading of overrides has no public name
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.errors import CompactHydraException, ConfigCompositionException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.launcher import Launcher
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

CONF = "pkg://kvbench.conf"
GROUPS = ("model", "policy", "task", "wrapper", "experiment", "logger")


class KvbenchSearchPath(SearchPathPlugin):
    """Puts `KvbenchSource` before kvbench's own configurations; other applications are left alone."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Change the search path of a Hydra application that starts."""
        if any(element.path == CONF for element in search_path.get_path()):
            search_path.prepend("kvbench", "kvbench://conf", SearchPathQuery(path=CONF))


class KvbenchSource(ConfigSource):
    """The groups in `GROUPS`."""

    @staticmethod
    def scheme() -> str:
        """The scheme of its entry in the search path."""
        return "kvbench"

    def available(self) -> bool:
        """It is part of the package."""
        return True

    def is_group(self, config_path: str) -> bool:
        """The groups are listed by the source of the files."""
        return False

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Composed names cannot be listed: there is no end of them."""
        return []

    def is_config(self, config_path: str) -> bool:
        """Whether a name of these groups has a file or is composed of others.

        Raises an error with the nearest names for one that no other source can have.
        """
        from kvbench.config.compose import check_settings, find, names
        from kvbench.config.folders import find_modules, module_folder
        from kvbench.config.presets import composed_config
        from kvbench.errors import hub, unknown

        group, _, name = config_path.removesuffix(".yaml").partition("/")
        find_modules(*map(module_folder, folders()))
        try:
            for file in (folder / f"{config_path.removesuffix('.yaml')}.yaml" for folder in folders()):
                if file.is_file():
                    check_settings(file)
            if group not in GROUPS:
                return False
            if find(group, name, folders()) is not None:
                return True
            if group != "experiment" and composed_config(group, name, folders()) is not None:
                return True
            if name != "None" and not _others():  # `experiment: null` in a defaults list is "None"
                raise unknown(group, name, names(group, folders()), hub(group, name))
            return False
        except ValueError as error:
            raise ConfigCompositionException(str(error)) from error

    def load_config(self, config_path: str) -> ConfigResult:
        """The configuration of a name, open for fields that it leaves to the defaults of a class."""
        from kvbench.config.compose import check_file, find, in_one_line
        from kvbench.config.presets import composed_config

        group, _, name = config_path.removesuffix(".yaml").partition("/")
        file = find(group, name, folders())
        if file is None:
            config, header = OmegaConf.create(composed_config(group, name, folders())), {"package": None}
        else:
            try:
                check_file(group, name, folders())
                config, header = OmegaConf.load(file), self._get_header_dict(file.read_text(encoding="utf-8"))
            except (YAMLError, ValueError) as error:
                raise ConfigCompositionException(in_one_line(file, error)) from error
        OmegaConf.set_struct(config, False)
        return ConfigResult(config=config, path=f"kvbench://{config_path}", provider=self.provider, header=header)


def folders() -> list[Path]:
    """The folders of --config-dir and hydra.searchpath, which may hold parts of a composed name."""
    from kvbench.config.compose import OWN_FOLDERS

    if (own := OWN_FOLDERS.get()) is not None:
        return list(own)
    if not GlobalHydra.instance().is_initialized():
        return []
    sources = GlobalHydra.instance().config_loader().get_sources()
    return [Path(source.path) for source in sources if source.scheme() == "file"]


def _others() -> list[str]:
    """The sources, such as a package of the user, whose names `find` does not know."""
    if not GlobalHydra.instance().is_initialized():
        return []
    known = (CONF, "pkg://hydra.conf", "kvbench:", "file:", "structured:")
    sources = GlobalHydra.instance().config_loader().get_sources()
    paths = [f"{source.scheme()}://{source.path}" for source in sources]
    return [path for path in paths if not path.startswith(known)]


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
        written = Path(str(self.config.hydra.sweep.dir)) / "multirun.yaml"
        if written.exists():  # Hydra's copy of the fields, in which hydra.launcher.setup may contain a secret
            written.chmod(0o600)
        loader = self.hydra_context.config_loader
        configs = [loader.load_sweep_config(self.config, list(overrides)) for overrides in job_overrides]
        from kvbench.cli import short_errors
        from kvbench.errors import counted
        from kvbench.terminal.command import quiet, share_cores

        share_cores()
        quiet()
        with short_errors():
            from kvbench.config.folders import module_folder
            from kvbench.results.definition import Entry
            from kvbench.run.run_config import plain  # torch, which a wrong configuration does not need
            from kvbench.sweeps import jobs

            modules = tuple(str(module_folder(folder)) for folder in folders())
            common = set(job_overrides[0]).intersection(*job_overrides[1:])
            entries, choices = [], [config.hydra.runtime.choices for config in configs]
            for overrides, config, chosen in zip(job_overrides, configs, choices, strict=True):
                title = " ".join(word for word in overrides if word not in common) or f"policy={chosen.policy}"
                names = chosen.model, chosen.policy, chosen.task
                entries.append(Entry(title, *names, None, plain(config), folder=str(Path.cwd()), modules=modules))
            command, launcher = shlex.join(["kvbench", *sys.argv[1:]]), jobs.Launcher(**self.fields)
            found = jobs.run_sweep(entries, folders(), choices[0].get("experiment"), command, launcher)
        failed = sum(status.error is not None for status in found)
        error = CompactHydraException(f"{failed} of {counted(len(found), 'run')} failed")
        returns = []
        for overrides, config, status in zip(job_overrides, configs, found, strict=True):
            one = JobReturn(overrides=list(overrides), cfg=config, hydra_cfg=config, task_name="kvbench")
            one.status = JobStatus.COMPLETED if status.error is None else JobStatus.FAILED
            one.return_value = status.score if status.error is None else error
            returns.append(one)
        return returns


Grid = Mapping[str, Any]


class GridSweeper(BasicSweeper):
    """`hydra/sweeper=grids`: a list of grids, each with its own fields, in one launch.

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
            try:
                super().sweep(line)
            except OSError as error:  # of multirun.yaml
                why = (
                    f"out={self.config.hydra.sweep.dir} cannot be written to ({error.strerror}), choose another folder"
                )
                raise CompactHydraException(why) from error
        jobs, self.launcher = self.launcher.jobs, launcher
        if not jobs:
            raise CompactHydraException("the values of this sweep have no combination: a glob() that finds no name?")
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
