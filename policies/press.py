"""Presses of NVIDIA's kvpress as policies: their code compresses, and we give the prompts and count what is held."""

import difflib
import importlib
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from kvbench.errors import ConfigError
from kvbench.policies.checks import check_choices
from kvbench.policies.policy import Policy
from kvbench.policies.policy_checks import check_budget
from kvbench.policies.schedule import Prompt
from kvbench.policies.stores.dense import Dense

INSTALL = "pip install --no-deps kvpress cachetools fire termcolor"


def installed_version() -> str:
    """The version of the kvpress that is installed; ValueError, saying how to get it, where there is none."""
    try:
        return version("kvpress")
    except PackageNotFoundError as error:
        raise ValueError(f"policy=kvpress runs presses of kvpress, which is not installed: {INSTALL}") from error


def ratio_for(kept: int, tokens: int) -> float:
    """The `compression_ratio` at which a press keeps so many of a prompt's tokens, all where there are no more.

    It keeps int(tokens * (1 - ratio)): half a token more is safe from rounding.
    """
    return max(0.0, 1 - (kept + 0.5) / tokens)


@dataclass(frozen=True)
class KVPress(Policy):
    """Any press of an installed kvpress, run as its own pipeline runs it: the cache is compressed once, then it grows.

    Bytes and tokens are those of its cache tensors: a press that masks keys (AdaKVPress) holds them all. A budget
    becomes the press's `compression_ratio`, for each prompt so that exactly so many tokens are kept; a ratio that is
    given counts instead, its budget is the share of the prompt that stays. A press without a ratio has no budget.

    press: its class, by name (`SnapKVPress`), or a press. attention: what the model attends with, as transformers names
    it; ObservedAttentionPress needs eager. version: of kvpress, part of a run's identity.
    Source: https://github.com/NVIDIA/kvpress (Devoto et al. 2025, arXiv 2510.00636).
    """

    press: object = None
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    version: str = field(init=False, default="")

    def __post_init__(self) -> None:
        check_choices(self)
        object.__setattr__(self, "version", installed_version())
        object.__setattr__(self, "press", _made(self.press))
        self._check_parts()
        if getattr(self.press, "threshold", 0.0) is None:
            raise ConfigError("press.threshold", None, f"a score below which {self.kind} evicts a token")
        ratio = _ratio(self.press)
        if ratio or ratio is None:
            object.__setattr__(self, "budget", 1 - ratio if ratio else None)
        else:
            check_budget(self.budget, self.name)

    def _check_parts(self) -> None:
        """ValueError for what our policies have and presses have not."""
        if self.schedule != Prompt(decode="grow"):
            raise ConfigError(
                "schedule",
                f"{self.schedule}, decode={self.schedule.decode}",
                why="cannot be: a press compresses a whole prompt and lets the cache grow (decode=grow)",
            )
        if (self.scorer, self.value, self.store) != (None, None, Dense()):
            raise ValueError("policy=kvpress takes no scorer, value or store of ours: the press is all of it")

    @property
    def kind(self) -> str:
        """The name of the press's class."""
        return type(self.press).__name__


def _ratio(press: object) -> float | None:
    """A press's `compression_ratio`; None if it has none, or only once it has run (DMSPress)."""
    try:
        return getattr(press, "compression_ratio", None)
    except AssertionError:
        return None


def presses() -> Any:  # noqa: ANN401 - a package without types
    """The package kvpress, whose import patches transformers' attention. ValueError if it cannot be imported."""
    installed = installed_version()
    try:
        return importlib.import_module("kvpress")
    except ImportError as error:
        raise ValueError(f"kvpress {installed} cannot be imported ({error}): {INSTALL}") from error


def press_class(name: str) -> str:
    """Where a press of kvpress is imported from. ValueError where there is none of this name."""
    installed = installed_version()
    package = presses()
    base = package.BasePress
    known = [key for key, found in vars(package).items() if isinstance(found, type) and issubclass(found, base)]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3) or sorted(known)
        raise ConfigError("press", name, why=f"is not in kvpress {installed}, which has {', '.join(near)}")
    found = getattr(package, name)
    return f"{found.__module__}.{found.__qualname__}"


def _made(press: object) -> object:
    """A press, given itself or by the name of its class."""
    if isinstance(press, str):
        module, _, name = press_class(press).rpartition(".")
        try:
            return getattr(importlib.import_module(module), name)()
        except (TypeError, AssertionError) as error:  # it wraps another one
            raise ConfigError("press", press, why=f"cannot be made without its settings: {error}") from error
    if not isinstance(press, presses().BasePress):
        raise ConfigError("press", press, why="must name a press of kvpress, such as policy=kvpress/SnapKVPress")
    return press
