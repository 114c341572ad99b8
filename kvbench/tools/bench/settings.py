"""The settings of a benchmark: defaults, an experiment of conf/bench, and `key=value` arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvbench.errors import ConfigError, UsageError, first_line, instead

CONF = Path(__file__).resolve().parents[2] / "conf" / "bench"
SWEEP = "sweep"
BASELINES = ("transformers", "kvpress")


def _key(default: Any, about: str) -> Any:  # noqa: ANN401 - a field of any type
    return field(default_factory=lambda: default, metadata={"about": about})


@dataclass
class Settings:
    """The fields of the command line."""

    model: Any = _key("pocket", "name of conf/model, or folder (random without *.safetensors)")
    dtype: str = _key("auto", "number format of the model, such as bfloat16")
    device: str = _key("auto", "cpu, cuda or cuda:1")
    policies: list[str] = _key(["full", "snapkv", "h2o"], "names of policies, such as snapkv,h2o")
    budgets: list[Any] = _key([256], "tokens per KV head, or shares of the prompt such as 0.5")
    lengths: list[int] = _key([2048], "prompt lengths in tokens")
    batches: list[int] = _key([1], "batch sizes")
    new_tokens: int = _key(64, "tokens generated after each prompt")
    rounds: int = _key(5, "measured rounds, after one warm-up round")
    baselines: list[str] = _key([*BASELINES], "transformers, kvpress, or [] for none")
    schedule: str | None = _key(None, "prompt or blocks, for all policies (default: the preset's)")
    decode: str | None = _key(None, "evict or grow, for all policies (default: the preset's)")
    threads: int | None = _key(None, "CPU threads of torch")
    out: str = _key("results/bench", "folder of the CSV file; rows are appended (results/bench)")


def experiments() -> dict[str, str]:
    """The experiments of conf/bench by name, each with the first line of its file."""
    first = {path.stem: path.read_text(encoding="utf-8").partition("\n")[0] for path in sorted(CONF.glob("*.yaml"))}
    return {name: line.lstrip("# ") for name, line in first.items()}


def parse(experiment: str, arguments: Sequence[str]) -> Settings:
    """The settings of an experiment ("": none) with `key=value` arguments. Raises UsageError for a wrong one."""
    keys = {one.name: one for one in fields(Settings)}
    for argument in arguments:
        key, equals, _ = argument.partition("=")
        if not equals or key.partition(".")[0] not in keys:
            raise UsageError(f"{argument} is not key=value with a known key{instead(key, list(keys))}")
    listed = [name for name, one in keys.items() if str(one.type).startswith("list")]
    given = [_as_list(argument) if argument.partition("=")[0] in listed else argument for argument in arguments]
    try:
        own = OmegaConf.load(CONF / f"{experiment}.yaml") if experiment not in ("", SWEEP) else OmegaConf.create({})
        if any(argument.startswith("model=") for argument in given):
            assert isinstance(own, DictConfig)
            own.pop("model", None)  # a name replaces the configuration of an experiment's model
        merged = OmegaConf.merge(OmegaConf.structured(Settings), own, OmegaConf.from_dotlist(given))
        settings = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        name = getattr(error, "full_key", None)
        raise UsageError(f"{name or 'settings'}: {first_line(error)}") from error
    assert isinstance(settings, Settings)
    _check(settings)
    return settings


def _as_list(argument: str) -> str:
    key, _, value = argument.partition("=")
    return argument if value.startswith("[") else f"{key}=[{value}]"


def _check(settings: Settings) -> None:
    for key in ("policies", "budgets", "lengths", "batches"):
        if not getattr(settings, key):
            raise ConfigError(key, "[]", "a list with at least one value")
    for key, value in vars(settings).items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int) and number < 1:
                raise ConfigError(key, number, "at least 1")
    if settings.new_tokens < 2:
        raise ConfigError("new_tokens", settings.new_tokens, "at least 2: the first token belongs to the prefill")
    for name in settings.baselines:
        if name not in BASELINES:
            raise ConfigError("baselines", name, " or ".join(BASELINES))
