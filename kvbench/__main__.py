"""`python -m kvbench`: one run; with `-m` a sweep. A plain Hydra application on the configurations of conf/."""

import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf


@hydra.main(config_path="pkg://kvbench.conf", config_name="config", version_base="1.3")
def app(config: DictConfig) -> float | None:
    """Compute one run, print its table and return its score, which a sweeper can optimize."""
    from kvbench.cli import ready, short_errors

    ready()
    with short_errors():
        from kvbench.sweeps.launch import run_one
        from kvbench.sweeps.plan import Asked

        runtime = HydraConfig.get().runtime
        folders = [source.path for source in runtime.config_sources if source["schema"] == "file"]
        values = OmegaConf.to_container(config, resolve=True)
        return run_one(Asked(f"policy={runtime.choices.policy}", values, dict(runtime.choices), folders))


if __name__ == "__main__":
    from kvbench.cli import main

    sys.exit(main())
