"""Configurations as Hydra composes them from the words of a command line, and the modules of the other commands."""

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra

from hydra_plugins.kvbench.plugins import narrowed
from kvbench.config.compose import CONF, load
from kvbench.run.run_config import RunConfig, plain, typed

MAINS = {
    "bench": "kvbench.tools.bench.cli",
    "calibrate": "kvbench.tools.calibrate",
    "claims": "kvbench.claims",
    "diagnose": "kvbench.tools.diagnose",
    "memory": "kvbench.memory",
    "plot": "kvbench.plot",
    "report": "kvbench.report.html.report",
    "results": "kvbench.results.__main__",
    "score": "kvbench.tools.score",
    "sweep": "kvbench.sweep",
    "tables": "kvbench.papers.cli",
}


def composed(*words: str, config_dir: str | None = None) -> RunConfig:
    """The run of a command line that asks for one."""
    GlobalHydra.instance().clear()
    flags = [] if config_dir is None else [f"hydra.searchpath=[file://{config_dir}]"]
    with initialize_config_module("kvbench.conf", version_base="1.3"):
        config = compose("config", [*flags, *words], return_hydra_config=True)
        return typed(plain(config), dict(config.hydra.runtime.choices))


def lines_of(experiment: str, *arguments: str) -> list[list[str]]:
    """The overrides of each grid of an experiment, joined with those of a command line."""
    return narrowed(load(CONF / "experiment" / f"{experiment}.yaml")["hydra"]["sweeper"]["grids"], arguments)


def grids_of(experiment: str) -> list[dict[str, tuple[str, ...]]]:
    """The grids of an experiment: of each field its values as a command line has them."""
    pairs = [[word.partition("=") for word in line] for line in lines_of(experiment)]
    return [{key: (text,) if text[0] == "[" else tuple(text.split(",")) for key, _, text in line} for line in pairs]


def first_of(words: list[str]) -> list[str]:
    """A command line that asks for one run: the first value of each list, without -m."""
    return [w if w.partition("=")[2][:1] in "[{'" else w.split(",")[0] for w in words if w != "-m"]
