"""The command `kvbench`: a Hydra application for a run or a sweep (`-m`), and sub-commands: `kvbench report`."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.hydra import Hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import CompactHydraException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from kvbench.config.compose import CONF, check_run_fields, load, names, refuse_unused
from kvbench.config.folders import find_modules
from kvbench.errors import ConfigError, UsageError, first_line, instead, unknown
from kvbench.terminal.command import (
    BROKEN_PIPE,
    Commands,
    close_pipe,
    command,
    our_version,
    program,
    quiet,
    share_cores,
    write_message,
)
from kvbench.terminal.escapes import unescaped

COMPLETE = "_KVBENCH_COMPLETE"
READ_RESULTS = ("sweep", "results", "report", "plot", "tables", "claims")
"""Commands that find no modules in the working folder, because it may hold results of others."""
PARTS = ("model", "policy", "task")
"""The groups of which a run has one each."""


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


COMMANDS = Commands(
    "kvbench",
    {
        "policies": ("kvbench.policies.__main__:cli", "all policies, or the idea, equation and fields of one"),
        "tasks": ("kvbench.tasks.__main__:cli", "all tasks, or the fields of one"),
        "models": ("kvbench.models.__main__:cli", "all named models, or the fields of one"),
        "sweep": ("kvbench.sweep:cli", "follow, continue or stop a sweep: status, wait, resume, cancel"),
        "results": ("kvbench.results.__main__:cli", "tables, checks and later logging of finished runs"),
        "report": ("kvbench.report.__main__:cli", "one HTML page of all runs below a folder"),
        "plot": ("kvbench.plot:cli", "figures of finished runs"),
        "tables": ("kvbench.tables:cli", "published tables, compared with your runs"),
        "claims": ("kvbench.claims:cli", "claims of papers, decided from your runs"),
        "memory": ("kvbench.memory:cli", "exact bytes of a cache, without weights"),
        "bench": ("kvbench.bench:cli", "times and memory of policies"),
        "diagnose": ("kvbench.diagnose:cli", "diagnostics of policies on prompts"),
        "calibrate": ("kvbench.calibrate:cli", "files that some policies need for a model"),
        "score": ("kvbench.score:cli", "scores of recorded predictions"),
        "lm-eval": ("kvbench.lm_eval:cli", "lm-eval's command line with the model kvbench"),
    },
    "",
)


HELP = """\
kvbench measures what a smaller KV cache costs, and verifies that it was smaller.

Examples: one run on the pocket model, a sweep, the demo:
  kvbench policy=caote_snapkv budget=256
  kvbench -m policy=full,snapkv,caote_snapkv budget=64,128
  kvbench experiment=demo

== Commands (kvbench COMMAND --help) ==
{commands}

== Groups (group=name) ==
{groups}
Policies also have variants (kvec_beta0.5, cake_ind_var, ...) and composed names: caote_knorm (a wrapper before a
policy), kivi_g32_r128 and snapkv_kivi_g32 (a store with settings, alone or after a policy), kvpress/KnormPress.
task=lm_eval/NAME is any task of lm-eval. model=/folder is a model on this machine. hydra/launcher=kvbench runs
sweeps here, hydra/launcher=slurm on SLURM.

== Fields (field=value); fields of parts by their path: policy.scorer.window=16, task.lengths=[2048] ==
{fields}

Powered by Hydra (https://hydra.cc)
Use --hydra-help to view Hydra specific help
"""


@hydra.main(config_path="pkg://kvbench.conf", config_name="config", version_base="1.3")
def app(config: DictConfig) -> float | None:
    """Compute one run, print its table and return its score, which a sweeper can optimize."""
    share_cores()
    quiet()
    with short_errors():
        from kvbench.results.definition import Entry
        from kvbench.run.run_config import plain
        from kvbench.sweeps.compute import run_one  # torch, which --help and --cfg do not need

        own: Any = HydraConfig.get()
        if own.sweeper.get("grids") or own.sweeper.get("params"):
            write_message("this experiment is a sweep, but only one run is computed: add -m, or hydra.mode=MULTIRUN")
        folders = [Path(source["path"]) for source in own.runtime.config_sources if source["schema"] == "file"]
        chosen = own.runtime.choices
        names = chosen.model, chosen.policy, chosen.task
        return run_one(Entry(f"policy={chosen.policy}", *names, None, plain(config)), folders)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line in this process and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    share_cores()
    if instruction := os.environ.get(COMPLETE):
        from kvbench.config.completion import complete_overrides
        from kvbench.terminal.completion import complete

        return complete(COMMANDS, complete_overrides, instruction, COMPLETE)
    if words == ["--version"]:
        sys.stdout.write(f"{our_version()}\n")
        return 0
    if not words or words[0] not in READ_RESULTS:
        find_modules(Path.cwd())
    if words and words[0] in COMMANDS.places:
        return program(COMMANDS)(words)
    if not {"-h", "--help"}.isdisjoint(words):  # Hydra would first list every group of every folder
        commands = "\n".join(f"  {name:10} {about}" for name, (_, about) in COMMANDS.places.items())
        sys.stdout.write(HELP.format(commands=commands, groups=_groups(), fields=_fields()))
        return 0
    if words and words[0][:1] not in ("-", "+", "~") and "=" not in words[0]:
        groups = [group for group in PARTS if words[0] in names(group)]
        is_name = "".join(f"; {words[0]} is a {group}: kvbench {group}={words[0]}" for group in groups)
        raise unknown("command", words[0], list(COMMANDS.places), is_name)
    words = [_without_plus(word) for word in words]
    _check_options([word for word in words if word[:1] == "-"])
    optimizes = any(word.startswith("hydra/sweeper=") for word in words)
    for word in words:
        _check_word(word, optimizes)
    _check_launcher(words)
    if not optimizes and {"-m", "--multirun", "hydra.mode=MULTIRUN"}.isdisjoint(words):
        _refuse_several(words)
    before, sys.argv = sys.argv, ["kvbench", *map(unescaped, words)]
    try:
        with _composed_once(words):
            app()
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    finally:
        sys.argv = before
    return 0


@contextmanager
def _composed_once(words: Sequence[str]) -> Iterator[None]:
    """Hydra composes every configuration twice, first to read `hydra.mode` from it: not where no file can set it."""
    files = ("experiment=", "hydra.", "hydra/", "--config", "-c", "+", "~")
    if any(word.startswith(files) for word in words):
        yield
        return
    read, Hydra.get_mode = Hydra.get_mode, lambda *_, **__: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Hydra.get_mode = read  # type: ignore[method-assign]


def _without_plus(word: str) -> str:
    """`+experiment=demo` as `experiment=demo`: every group is in the defaults, so that nothing is added."""
    key = word.lstrip("+").partition("=")[0]
    return word.lstrip("+") if key in (*PARTS, "logger", "experiment") else word


def _check_options(options: Sequence[str]) -> None:
    """Refuse options that Hydra does not have, and `-p` without `--cfg`, which would be ignored."""
    known = list(get_args_parser()._option_string_actions)
    for option in options:
        name = option.partition("=")[0]
        if not any(one.startswith(name) or (one[1] != "-" and name.startswith(one)) for one in known):
            field = name.lstrip("-").replace("-", "_")
            advice = f"write {field}=... without dashes" if field in _field_names() else "see kvbench --hydra-help"
            raise UsageError(f"{name} is not an option: {advice}")
    packages = [option for option in options if option.startswith(("-p", "--package"))]
    if packages and not any(option.startswith(("-c", "--cfg")) for option in options):
        raise UsageError(f"{packages[0]} is an option of --cfg: choose a policy by policy=NAME")


def _field_names() -> set[str]:
    return {*PARTS, "logger", "experiment", *load(CONF / "config.yaml")}


def _check_launcher(words: Sequence[str]) -> None:
    """Refuse launchers and sweepers with a name that is nearly one of ours, and fields that the launcher lacks."""
    given = dict(word.lstrip("+").partition("=")[::2] for word in words)
    for group in ("hydra/launcher", "hydra/sweeper"):
        own = ["basic", *names(group)]
        if given.get(group, "basic") not in own and get_close_matches(given[group], own):
            raise unknown(group, given[group], own)
    if any(word.startswith(("experiment=", "--config-n", "-cn")) for word in words):
        return  # the file may choose a launcher
    launcher = given.get("hydra/launcher", "kvbench")  # as in conf/config.yaml
    for key, value in given.items():
        name = key.removeprefix("hydra.launcher.").partition(".")[0]
        if key.startswith("hydra.launcher.") and launcher in names("hydra/launcher"):
            fields = [field for field in load(CONF / "hydra/launcher" / f"{launcher}.yaml") if field != "_target_"]
            if name not in fields:
                why = f"is not a field of hydra/launcher={launcher}{instead(name, fields, noun='field')}"
                raise ConfigError(key, value, why=why)


def _refuse_several(words: Sequence[str]) -> None:
    """Refuse several values of a field in a single run: Hydra would also name lists, which no run has here."""
    if any(word.startswith(("experiment=", "+experiment=", "--config-n", "-cn")) for word in words):
        return  # the file may be a sweep
    for word in words:
        if "=" in word and word[:1] not in ("-", "~"):
            with suppress(OverrideParseException):  # Hydra says what is wrong
                if OverridesParser.create().parse_override(word).is_sweep_override():
                    key, _, value = word.lstrip("+").partition("=")
                    raise ConfigError(key, value, why="has several values, which is a sweep: add -m")


def _check_word(word: str, optimizes: bool) -> None:
    """Refuse groups without a name, and settings of Hydra that have no effect here. optimizes: with another sweeper."""
    key, _, value = word.lstrip("+~").partition("=")
    if word.startswith("~") and key in PARTS:
        raise ConfigError(key, None, why="is not allowed: a run needs one, choose it by its name")
    if word.startswith("~") or "=" not in word:
        return
    if key in (*PARTS, "logger", "experiment") and (value[:1] in ("", "[", "{") or "null" in value.split(",")):
        none = {"logger": "; logger=none logs nothing", "experiment": "; without experiment= there is none"}
        raise ConfigError(key, value, f"a name, or names for a sweep (-m {key}=a,b){none.get(key, '')}")
    if "interval(" in value and not optimizes:
        raise ConfigError(key, value, why="is a range for optimizers (hydra/sweeper=...): list values, as in 64,128")
    if word[0] != "+":
        try:
            check_run_fields({key: value}, groups=("experiment",))
        except ConfigError as error:
            # Hydra says what to do with other names
            if "did you mean" in str(error) or key.startswith(("engine.", "generation.")):
                raise
    refuse_unused(key, value)


@contextmanager
def short_errors() -> Iterator[None]:
    """Let Hydra show an error of the user as one message, without a traceback."""
    try:
        yield
    except BrokenPipeError:  # Hydra would show a traceback
        close_pipe()
        raise SystemExit(BROKEN_PIPE) from None
    except UsageError as error:
        raise CompactHydraException(str(error)) from error
    except OmegaConfBaseException as error:
        message = f"{error.full_key}: {first_line(error)}"
        raise CompactHydraException(message).with_traceback(error.__traceback__) from None  # Hydra adds a cause to it
