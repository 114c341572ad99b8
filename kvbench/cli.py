"""The Hydra application of `python -m kvbench`: one run; with `-m` a sweep."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from omegaconf import DictConfig, OmegaConf

from kvbench.config.tree import CONF, names
from kvbench.errors import UsageError
from kvbench.terminal.command import command, our_version, quiet, share_cores


def _fields() -> str:
    """The commented fields of conf/config.yaml, for --help."""
    text = (CONF / "config.yaml").read_text(encoding="utf-8")
    return text.partition("\n\n")[2].partition("\nhydra:")[0].strip()


def _groups() -> str:
    """The names of each group, for --help: folders by their name, and no variants of a policy (`kvec_beta0.5`)."""
    lines = []
    for group in ("policy", "task", "model", "experiment", "logger"):
        known = names(group)
        shown = [
            n for n in known if "/" not in n and (group != "policy" or not n.startswith(tuple(f"{o}_" for o in known)))
        ]
        inside = [f"{folder}/..." for folder in dict.fromkeys(n.partition("/")[0] for n in known if "/" in n)]
        lines.append(textwrap.fill(f"{group}: {', '.join([*shown, *inside])}", 118, subsequent_indent="  "))
    return "\n".join([*lines, ""])


OmegaConf.register_new_resolver("kvbench_fields", _fields, replace=True)
OmegaConf.register_new_resolver("kvbench_groups", _groups, replace=True)


@hydra.main(config_path="pkg://kvbench.conf", config_name="config", version_base="1.3")
def app(config: DictConfig) -> float | None:
    """Compute one run, print its table and return its score, which a sweeper can optimize."""
    share_cores()
    quiet()
    with short_errors():
        from kvbench.sweeps.compute import (
            Composed,
            run_one,  # torch, which --help and --cfg do not need
        )

        runtime: Any = HydraConfig.get().runtime
        folders = [Path(source["path"]) for source in runtime.config_sources if source["schema"] == "file"]
        values: Any = OmegaConf.to_container(config, resolve=True)
        return run_one(Composed(f"policy={runtime.choices.policy}", values, dict(runtime.choices), folders))


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line in this process and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words == ["--version"]:
        sys.stdout.write(f"{our_version()}\n")
        return 0
    before, sys.argv = sys.argv, ["kvbench", *words]
    share_cores()
    try:
        app()
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    finally:
        sys.argv = before
    return 0


@contextmanager
def short_errors() -> Iterator[None]:
    """Let Hydra show an error of the user as one message, without a traceback."""
    try:
        yield
    except UsageError as error:
        raise CompactHydraException(str(error)) from error
